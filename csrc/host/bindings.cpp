// Python's view: tensors come as addresses, their owner keeps them alive and contiguous during the call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "channels.h"
#include "host_group.h"

namespace py = pybind11;

namespace {

void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// [parts, 4]: address, rows, bytes of a row, bytes from one row to the next
using Table = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::vector<host::Rows> rows_of(const Table& table) {
    const auto parts = table.unchecked<2>();
    if (parts.shape(1) != 4) throw std::invalid_argument("parts have address, rows, bytes of a row and stride");
    std::vector<host::Rows> result;
    result.reserve(parts.shape(0));
    for (py::ssize_t i = 0; i < parts.shape(0); ++i) {
        result.push_back({static_cast<char*>(at(static_cast<std::uintptr_t>(parts(i, 0)))),
                          static_cast<std::size_t>(parts(i, 1)), static_cast<std::size_t>(parts(i, 2)),
                          static_cast<std::size_t>(parts(i, 3))});
    }
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
             [](Channels& channels, const Table& parts, int to) {
                 std::vector<host::Rows> rows = rows_of(parts);
                 py::gil_scoped_release unlocked;
                 return channels.send(std::move(rows), to);
             })
        .def("receive",
             [](Channels& channels, const Table& parts, int from) {
                 std::vector<host::Rows> rows = rows_of(parts);
                 py::gil_scoped_release unlocked;
                 return channels.receive(std::move(rows), from);
             })
        .def("is_sent", &Channels::is_sent, Unlocked())
        .def("is_received", &Channels::is_received, Unlocked())
        .def("wait_sent", &Channels::wait_sent, Unlocked())
        .def("wait_received", &Channels::wait_received, Unlocked());
}
