// The CPU kernels as the module `realhf.engine._kernels`. Tensors come as the addresses of contiguous memory, so that
// nothing here depends on torch; `realhf/engine/kv_cache.py`, the only importer, checks shapes and dtypes.
#include <pybind11/pybind11.h>

#include "paged_attention.h"

namespace py = pybind11;
using namespace kernels;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.attr("PAGE") = PAGE;
    py::enum_<DType>(m, "DType")
        .value("float32", DType::float32)
        .value("float64", DType::float64)
        .value("bfloat16", DType::bfloat16);
    m.def(
        "write",
        [](DType dtype, int64_t kv_heads, int64_t head_dim, uintptr_t keys, uintptr_t values, int64_t tokens,
           uintptr_t places, uintptr_t key, uintptr_t value) {
            write(dtype, {kv_heads, 1, head_dim}, {at<void>(keys), at<void>(values)}, tokens, at<int64_t>(places),
                  at<void>(key), at<void>(value));
        },
        py::call_guard<py::gil_scoped_release>());
    m.def(
        "attend",
        [](DType dtype, int64_t kv_heads, int64_t group, int64_t head_dim, uintptr_t keys, uintptr_t values,
           int64_t count, uintptr_t table, int64_t stride, uintptr_t lengths, uintptr_t query, uintptr_t key,
           uintptr_t value, double scale, int64_t window, uintptr_t out) {
            attend(dtype, {kv_heads, group, head_dim}, {at<void>(keys), at<void>(values)},
                   {count, at<int32_t>(table), stride, at<int64_t>(lengths)}, at<void>(query), at<void>(key),
                   at<void>(value), scale, window, at<void>(out));
        },
        py::call_guard<py::gil_scoped_release>());
}
