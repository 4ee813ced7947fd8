// The CPU kernels as the module `realhf.cpu._cpu`. Tensors come as the addresses of their memory, so that nothing
// here depends on torch; its importers check shapes, strides and dtypes.
#include <pybind11/pybind11.h>

#include "bit_sums.h"
#include "changes.h"
#include "decode_layer.h"
#include "layers.h"
#include "paged_attention.h"
#include "products.h"
#include "vocabulary.h"

namespace py = pybind11;
using namespace kernels;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

Matrix matrix(uintptr_t address, int64_t stride) { return {at<void>(address), stride}; }

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    using Release = py::call_guard<py::gil_scoped_release>;
    m.attr("PAGE") = PAGE;
    py::enum_<DType>(m, "DType", py::module_local())
        .value("float32", DType::float32)
        .value("float64", DType::float64)
        .value("bfloat16", DType::bfloat16);
    m.def(
        "write",
        [](DType dtype, int64_t kv_heads, int64_t head_dim, uintptr_t keys, uintptr_t values, int64_t pages,
           int64_t tokens, uintptr_t places, uintptr_t key, int64_t key_stride, uintptr_t value,
           int64_t value_stride) {
            write(dtype, {kv_heads, 1, head_dim}, {at<void>(keys), at<void>(values), pages}, tokens,
                  at<int64_t>(places), matrix(key, key_stride), matrix(value, value_stride));
        },
        Release());
    m.def(
        "attend",
        [](DType dtype, int64_t kv_heads, int64_t group, int64_t head_dim, uintptr_t keys, uintptr_t values,
           int64_t pages, int64_t count, uintptr_t table, int64_t stride, uintptr_t lengths, uintptr_t query,
           int64_t query_stride, uintptr_t key, int64_t key_stride, uintptr_t value, int64_t value_stride,
           double scale, int64_t window, uintptr_t out) {
            attend(dtype, {kv_heads, group, head_dim}, {at<void>(keys), at<void>(values), pages},
                   {count, at<int32_t>(table), stride, at<int64_t>(lengths)}, matrix(query, query_stride),
                   matrix(key, key_stride), matrix(value, value_stride), scale, window, at<void>(out));
        },
        Release());
    py::enum_<Instructions>(m, "Instructions")
        .value("any", Instructions::any)
        .value("avx2", Instructions::avx2)
        .value("avx512", Instructions::avx512)
        .value("amx", Instructions::amx);
    m.def("use_instructions", use_instructions);
    m.def("packed_bytes", packed_bytes);
    m.def(
        "pack",
        [](DType dtype, int64_t out, int64_t in, uintptr_t weight, int64_t stride, bool by_columns, uintptr_t packed) {
            pack(dtype, out, in, matrix(weight, stride), by_columns, at<void>(packed));
        },
        Release());
    m.def(
        "product",
        [](DType dtype, int64_t rows, int64_t out, int64_t in, uintptr_t x, int64_t stride, uintptr_t packed,
           uintptr_t bias, bool adds, uintptr_t y) {
            product(dtype, rows, out, in, matrix(x, stride), at<void>(packed), at<void>(bias), adds, matrix(y, out));
        },
        Release());
    m.def(
        "rms_norm",
        [](DType dtype, int64_t rows, int64_t width, uintptr_t x, int64_t x_stride, uintptr_t weight, double epsilon,
           uintptr_t out) {
            rms_norm(dtype, rows, width, matrix(x, x_stride), at<void>(weight), static_cast<float>(epsilon),
                     matrix(out, width));
        },
        Release());
    m.def(
        "rotate",
        [](DType dtype, int64_t rows, int64_t heads, int64_t head_dim, uintptr_t x, int64_t stride, uintptr_t cosine,
           uintptr_t sine, uintptr_t out) {
            rotate(dtype, rows, heads, head_dim, matrix(x, stride), at<void>(cosine), at<void>(sine),
                   matrix(out, heads * head_dim));
        },
        Release());
    m.def(
        "gated_silu",
        [](DType dtype, int64_t rows, int64_t width, uintptr_t gate, int64_t gate_stride, uintptr_t up,
           int64_t up_stride, uintptr_t out) {
            gated_silu(dtype, rows, width, matrix(gate, gate_stride), matrix(up, up_stride), matrix(out, width));
        },
        Release());
    m.def(
        "rms_norm_gradient",
        [](DType dtype, int64_t rows, int64_t width, uintptr_t x, int64_t x_stride, uintptr_t weight, double epsilon,
           uintptr_t grad, int64_t grad_stride, uintptr_t grad_x, uintptr_t grad_weight) {
            rms_norm_gradient(dtype, rows, width, matrix(x, x_stride), at<void>(weight), static_cast<float>(epsilon),
                              matrix(grad, grad_stride), matrix(grad_x, width), at<double>(grad_weight));
        },
        Release());
    m.def(
        "gated_silu_gradient",
        [](DType dtype, int64_t rows, int64_t width, uintptr_t gate, int64_t gate_stride, uintptr_t up,
           int64_t up_stride, uintptr_t grad, int64_t grad_stride, uintptr_t grad_gate, uintptr_t grad_up) {
            gated_silu_gradient(dtype, rows, width, matrix(gate, gate_stride), matrix(up, up_stride),
                                matrix(grad, grad_stride), matrix(grad_gate, width), matrix(grad_up, width));
        },
        Release());
    m.def(
        "square_sum",
        [](DType dtype, int64_t count, uintptr_t numbers) { return square_sum(dtype, count, at<void>(numbers)); },
        Release());
    m.def(
        "bit_sum",
        [](int64_t bytes, int64_t rows, int64_t words, uintptr_t data, int64_t stride, int64_t first, int64_t step) {
            return bit_sum(bytes, rows, words, at<void>(data), stride, first, step);
        },
        Release());
    m.def(
        "encode_changes",
        [](int64_t bytes, uintptr_t rows, int64_t num_rows, uintptr_t known, int64_t elements, uintptr_t out) {
            return encode_changes(bytes, at<ElementRows>(rows), num_rows, at<void>(known), elements, at<uint8_t>(out));
        },
        Release());
    py::class_<LayerShape>(m, "LayerShape", py::module_local())
        .def(py::init([](int64_t hidden, int64_t kv_heads, int64_t group, int64_t head_dim, int64_t inner,
                         int64_t leaves) {
                 return LayerShape{hidden, {kv_heads, group, head_dim}, inner, leaves};
             }),
             py::kw_only(), py::arg("hidden"), py::arg("kv_heads"), py::arg("group"), py::arg("head_dim"),
             py::arg("inner"), py::arg("leaves"))
        .def_property_readonly("buffer", &LayerShape::buffer);
    py::class_<LayerWeights>(m, "LayerWeights", py::module_local())
        .def(py::init([](uintptr_t input_norm, uintptr_t qkv, uintptr_t qkv_bias, uintptr_t output,
                         uintptr_t post_norm, uintptr_t gate_up, uintptr_t down, float epsilon) {
                 return LayerWeights{at<void>(input_norm), at<void>(qkv),     at<void>(qkv_bias), at<void>(output),
                                     at<void>(post_norm),  at<void>(gate_up), at<void>(down),     epsilon};
             }),
             py::kw_only(), py::arg("input_norm"), py::arg("qkv"), py::arg("qkv_bias"), py::arg("output"),
             py::arg("post_norm"), py::arg("gate_up"), py::arg("down"), py::arg("epsilon"));
    m.def(
        "decode_layer",
        [](DType dtype, const LayerShape& shape, const LayerWeights& weights, uintptr_t x, uintptr_t cosine,
           uintptr_t sine, uintptr_t keys, uintptr_t values, int64_t pages, int64_t count, uintptr_t table,
           int64_t stride, uintptr_t lengths, int64_t window, uintptr_t buffer) {
            decode_layer(dtype, shape, weights, at<void>(x), at<void>(cosine), at<void>(sine),
                         {at<void>(keys), at<void>(values), pages},
                         {count, at<int32_t>(table), stride, at<int64_t>(lengths)}, window, at<void>(buffer));
        },
        Release());
    m.def(
        "statistics",
        [](DType dtype, int64_t rows, int64_t vocab, uintptr_t logits, double temperature, uintptr_t tokens,
           uintptr_t logsumexp, uintptr_t largest, uintptr_t picked, uintptr_t mean) {
            statistics(dtype, rows, vocab, at<void>(logits), static_cast<float>(temperature), at<int64_t>(tokens),
                       at<float>(logsumexp), at<float>(largest), at<float>(picked), at<float>(mean));
        },
        Release());
    m.def(
        "logprob_gradient",
        [](DType dtype, int64_t rows, int64_t vocab, uintptr_t logits, double temperature, uintptr_t tokens,
           uintptr_t logsumexp, uintptr_t entropy, uintptr_t grad_logprob, uintptr_t grad_entropy,
           uintptr_t at_token, uintptr_t out) {
            logprob_gradient(dtype, rows, vocab, at<void>(logits), static_cast<float>(temperature),
                             at<int64_t>(tokens), {at<float>(logsumexp), at<float>(entropy)},
                             {at<float>(grad_logprob), at<float>(grad_entropy), at<float>(at_token)}, at<void>(out));
        },
        Release());
    m.def(
        "draw",
        [](DType dtype, int64_t rows, int64_t vocab, uintptr_t logits, double temperature, uintptr_t uniforms,
           uintptr_t tokens, uintptr_t logprobs, uintptr_t margins) {
            draw(dtype, rows, vocab, at<void>(logits), static_cast<float>(temperature), at<double>(uniforms),
                 at<int64_t>(tokens), at<float>(logprobs), at<double>(margins));
        },
        Release());
}
