// Python's view: tensors come as addresses, their owner keeps them alive and contiguous during the call.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "channels.h"
#include "host_group.h"

namespace py = pybind11;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

host::Rows whole(std::uintptr_t address, std::size_t bytes) { return {static_cast<char*>(at(address)), 1, bytes, 0}; }

// (address, rows, bytes of a row, bytes from one row to the next)
using RowsTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t>;

std::vector<host::Rows> rows_of(const std::vector<RowsTuple>& parts) {
    std::vector<host::Rows> result;
    result.reserve(parts.size());
    for (const auto& [address, rows, row_bytes, stride_bytes] : parts)
        result.push_back({static_cast<char*>(at(address)), rows, row_bytes, stride_bytes});
    return result;
}

}  // namespace

PYBIND11_MODULE(_host, module) {
    using host::Channels;
    using host::DType;
    using host::HostGroup;
    using host::Operation;
    using Unlocked = py::call_guard<py::gil_scoped_release>;

    py::register_exception<host::PeerError>(module, "PeerError", PyExc_RuntimeError);
    py::enum_<DType>(module, "DType")
        .value("float32", DType::float32)
        .value("float64", DType::float64)
        .value("bfloat16", DType::bfloat16)
        .value("int64", DType::int64);
    py::enum_<Operation>(module, "Operation").value("sum", Operation::sum).value("max", Operation::max);
    py::class_<HostGroup>(module, "HostGroup")
        .def(py::init<int, int, int, std::size_t, double>(), py::arg("descriptor"), py::arg("rank"), py::arg("size"),
             py::arg("slot_bytes"), py::arg("timeout_s"))
        .def_static("required_bytes", &HostGroup::required_bytes)
        .def("all_reduce",
             [](HostGroup& group, std::uintptr_t data, std::size_t count, DType dtype, Operation operation) {
                 group.all_reduce(at(data), count, dtype, operation);
             }, Unlocked())
        .def("reduce_scatter",
             [](HostGroup& group, std::uintptr_t input, std::uintptr_t output, std::size_t count, DType dtype,
                Operation operation) { group.reduce_scatter(at(input), at(output), count, dtype, operation); },
             Unlocked())
        .def("all_gather",
             [](HostGroup& group, std::uintptr_t input, std::uintptr_t output, std::size_t bytes) {
                 group.all_gather(at(input), at(output), bytes);
             }, Unlocked())
        .def("broadcast",
             [](HostGroup& group, std::uintptr_t data, std::size_t bytes, int root) {
                 group.broadcast(at(data), bytes, root);
             }, Unlocked())
        .def("barrier", &HostGroup::barrier, Unlocked());
    py::class_<Channels>(module, "Channels")
        .def(py::init<int, int, int, std::size_t>(), py::arg("descriptor"), py::arg("rank"), py::arg("size"),
             py::arg("ring_bytes"))
        .def_static("required_bytes", &Channels::required_bytes)
        .def("send",
             [](Channels& channels, std::uintptr_t data, std::size_t bytes, int to) {
                 return channels.send({whole(data, bytes)}, to);
             }, Unlocked())
        .def("send_parts",
             [](Channels& channels, const std::vector<RowsTuple>& parts, int to) {
                 return channels.send(rows_of(parts), to);
             }, Unlocked())
        .def("receive",
             [](Channels& channels, std::uintptr_t data, std::size_t bytes, int from) {
                 return channels.receive({whole(data, bytes)}, from);
             }, Unlocked())
        .def("receive_parts",
             [](Channels& channels, const std::vector<RowsTuple>& parts, int from) {
                 return channels.receive(rows_of(parts), from);
             }, Unlocked())
        .def("is_sent", &Channels::is_sent, Unlocked())
        .def("is_received", &Channels::is_received, Unlocked())
        .def("wait_sent", &Channels::wait_sent, Unlocked())
        .def("wait_received", &Channels::wait_received, Unlocked());
}
