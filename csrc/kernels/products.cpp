#include "products.h"

#include <algorithm>
#include <vector>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(KERNELS_NO_CLONES)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_VARIANTS 1
#define FOR_PRODUCTS __attribute__((target("avx512vl,avx512bf16")))
#define FOR_MATRICES __attribute__((target("avx512vl,avx512bf16,amx-tile,amx-bf16")))
#else
#define HAS_VARIANTS 0
#endif

namespace kernels {
namespace {

// A unit is what a lane multiplies at a time: a float, or two neighbouring bfloat16.
template <class S>
constexpr int64_t PER_UNIT = 4 / sizeof(S);

template <class S>
void pack_units(int64_t out, int64_t in, Matrix weight, void* packed) {
    const int64_t units = in / PER_UNIT<S>;
    uint32_t* to = static_cast<uint32_t*>(packed);
    for (int64_t first = 0; first < out; first += PANEL, to += units * PANEL) {
        const int64_t count = std::min(out - first, int64_t{PANEL});
        if (count < PANEL) std::fill(to, to + units * PANEL, 0u);
        for (int64_t begin = 0; begin < units; begin += LANES) {  // a square in the first cache at a time
            const int64_t end = std::min(begin + LANES, units);
            for (int64_t o = 0; o < count; ++o) {
                const S* const row = static_cast<const S*>(weight.data) + (first + o) * weight.stride;
                for (int64_t u = begin; u < end; ++u)
                    std::memcpy(to + u * PANEL + o, row + u * PER_UNIT<S>, sizeof(*to));
            }
        }
    }
}

// As `pack_units`, of a weight whose columns lie one behind the other.
template <class S>
void pack_columns(int64_t out, int64_t in, Matrix weight, void* packed) {
    const int64_t units = in / PER_UNIT<S>;
    S* to = static_cast<S*>(packed);
    for (int64_t first = 0; first < out; first += PANEL) {
        const int64_t count = std::min(out - first, int64_t{PANEL});
        for (int64_t u = 0; u < units; ++u, to += PANEL * PER_UNIT<S>) {
            if (count < PANEL) std::memset(static_cast<void*>(to), 0, PANEL * PER_UNIT<S> * sizeof(S));
            for (int64_t i = 0; i < PER_UNIT<S>; ++i) {
                const S* const column = static_cast<const S*>(weight.data) + (u * PER_UNIT<S> + i) * weight.stride + first;
                for (int64_t o = 0; o < count; ++o) to[o * PER_UNIT<S> + i] = column[o];
            }
        }
    }
}

template <class S>
struct Target {
    const S* bias;
    bool adds;
    Matrix y;

    // The sums of `count` outputs from `column` on.
    INLINE void put(Floats& total, int64_t row, int64_t column, int64_t count) const {
        S* const to = static_cast<S*>(y.data) + row * y.stride + column;
        Floats lanes;
        if (bias) {
            load(lanes, bias + column, count);
            total += lanes;
        }
        if (adds) {
            round_to<S>(total);
            load(lanes, to, count);
            total += lanes;
        }
        store(to, total, count);
    }
};

// Half of LANES, a register of AVX2.
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

// Sums of two registers a row, two registers of weights and one of x fit into the 16 that AVX2 has.
constexpr int HALF_TILE_ROWS = 6;
// With this number of rows, x stays in the second cache while all panels pass by.
constexpr int HALF_BLOCK_ROWS = 12 * HALF_TILE_ROWS;

// The `i`th numbers of eight units.
template <class S>
INLINE void load_units(Eight& numbers, const uint32_t* from, int i) {
    EightWords words;
    std::memcpy(&words, from, sizeof(words));
    if constexpr (sizeof(S) == sizeof(BFloat16)) words = i ? words & 0xFFFF0000u : words << 16;
    std::memcpy(&numbers, &words, sizeof(numbers));
}

// The sums of ROWS rows of x, [in, ROWS], and half a panel.
template <int ROWS, class S>
INLINE void half_sums(const float* x, const uint32_t* panel, int64_t units, float* to) {
    Eight sums[ROWS][2] = {};
    for (int64_t u = 0; u < units; ++u, panel += PANEL) {
#pragma GCC unroll 2
        for (int i = 0; i < PER_UNIT<S>; ++i, x += ROWS) {
            Eight first, second;
            load_units<S>(first, panel, i);
            load_units<S>(second, panel + LANES / 2, i);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                sums[r][0] += x[r] * first;
                sums[r][1] += x[r] * second;
            }
        }
    }
    std::memcpy(to, sums, sizeof(sums));
}

// Functions of their own, with nothing else in them: else the compiler keeps no sums in registers.
using HalfTile = void (*)(const float* x, const uint32_t* panel, int64_t units, float* to);
using HalfTiles = HalfTile[HALF_TILE_ROWS];
template <int ROWS, class S>
__attribute__((noinline)) void half_tile(const float* x, const uint32_t* panel, int64_t units, float* to) {
    half_sums<ROWS, S>(x, panel, units, to);
}
template <class S>
constexpr HalfTiles HALF_TILES = {half_tile<1, S>, half_tile<2, S>, half_tile<3, S>,
                                  half_tile<4, S>, half_tile<5, S>, half_tile<6, S>};

// `rows` rows of x as float32 in the order [in, rows].
template <class S>
void turn(int64_t rows, int64_t in, Matrix x, float* to) {
    for (int64_t row = 0; row < rows; ++row) {
        const S* const from = static_cast<const S*>(x.data) + row * x.stride;
        for (int64_t i = 0; i < in; ++i) {
            if constexpr (sizeof(S) == sizeof(BFloat16)) {
                const uint32_t word = static_cast<uint32_t>(from[i].bits) << 16;
                std::memcpy(to + i * rows + row, &word, sizeof(word));
            } else {
                to[i * rows + row] = from[i];
            }
        }
    }
}

template <class S>
void product_by_halves(int64_t rows, int64_t out, int64_t in, Matrix x, const void* packed, const Target<S>& target,
                       const HalfTiles& tiles) {
    const int64_t units = in / PER_UNIT<S>, blocks = (rows + HALF_BLOCK_ROWS - 1) / HALF_BLOCK_ROWS;
    std::vector<float> turned(static_cast<size_t>(std::min(rows, int64_t{HALF_BLOCK_ROWS}) * in));
    float sums[HALF_TILE_ROWS * LANES];
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first;
        const int64_t of_block = (count + HALF_TILE_ROWS - 1) / HALF_TILE_ROWS;
        const auto begin_of = [&](int64_t tile) { return first + count * tile / of_block; };
        for (int64_t t = 0; t < of_block; ++t) {
            const int64_t row = begin_of(t);
            const Matrix from{static_cast<S*>(x.data) + row * x.stride, x.stride};
            turn<S>(begin_of(t + 1) - row, in, from, turned.data() + (row - first) * in);
        }
        for (int64_t column = 0; column < out; column += LANES) {
            const uint32_t* const panel =
                static_cast<const uint32_t*>(packed) + column / PANEL * PANEL * units + column % PANEL;
            for (int64_t t = 0; t < of_block; ++t) {
                const int64_t row = begin_of(t), of_tile = begin_of(t + 1) - row;
                tiles[of_tile - 1](turned.data() + (row - first) * in, panel, units, sums);
                for (int64_t r = 0; r < of_tile; ++r) {
                    Floats total;
                    load(total, sums + r * LANES);
                    target.put(total, row + r, column, std::min(out - column, int64_t{LANES}));
                }
            }
        }
    }
}

#if HAS_VARIANTS

template <int ROWS, class S>
__attribute__((noinline, target("avx2,fma"))) void half_tile_of_avx2(const float* x, const uint32_t* panel,
                                                                     int64_t units, float* to) {
    half_sums<ROWS, S>(x, panel, units, to);
}
template <class S>
constexpr HalfTiles HALF_TILES_OF_AVX2 = {half_tile_of_avx2<1, S>, half_tile_of_avx2<2, S>, half_tile_of_avx2<3, S>,
                                          half_tile_of_avx2<4, S>, half_tile_of_avx2<5, S>, half_tile_of_avx2<6, S>};

// Sums of two registers a row, two registers of weights and one of x fill the 32 that AVX-512 has.
constexpr int TILE_ROWS = 14;
// With this number of rows, x stays in the second cache while all panels pass by.
constexpr int BLOCK_ROWS = 8 * TILE_ROWS;

// total + x w, of the units in the lanes.
INLINE FOR_PRODUCTS __m512 multiply_add(__m512 total, __m512i x, __m512i w, float) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), total);
}
INLINE FOR_PRODUCTS __m512 multiply_add(__m512 total, __m512i x, __m512i w, BFloat16) {
    return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)w);
}

// The next panel, asked for a cache line at a time while this one is multiplied.
struct Ahead {
    const char *next, *end;

    INLINE void fetch() {
        if (next >= end) return;
        __builtin_prefetch(next, 0, 2);  // into the second cache
        next += 64;
    }
};

// The operands of a product in units.
struct Units {
    const uint32_t* x;
    int64_t stride;
    const uint32_t* panel;
    int64_t count;  // in a row
};

// ROWS rows by one panel, whose numbers are each loaded once for all rows. A function of its own, since the compiler
// keeps sums in registers only within one of moderate size. `hurries`: there is no other tile to fetch ahead in.
template <int ROWS, class S>
__attribute__((noinline)) FOR_PRODUCTS Ahead tile(Units units, Ahead ahead, bool hurries, int64_t row, int64_t column,
                                                  int64_t count, Target<S> target) {
    __m512 sums[ROWS][2];
    const uint32_t* const x = units.x + row * units.stride;
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t u = 0; u < units.count; ++u) {
        const __m512i first = _mm512_loadu_si512(units.panel + u * PANEL);
        const __m512i second = _mm512_loadu_si512(units.panel + u * PANEL + LANES);
        ahead.fetch();
        if (hurries) ahead.fetch();
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const __m512i number = _mm512_set1_epi32(static_cast<int>(x[r * units.stride + u]));
            sums[r][0] = multiply_add(sums[r][0], number, first, S{});
            sums[r][1] = multiply_add(sums[r][1], number, second, S{});
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        Floats first = (Floats)sums[r][0], second = (Floats)sums[r][1];
        target.put(first, row + r, column, std::min(count, int64_t{LANES}));
        if (count > LANES) target.put(second, row + r, column + LANES, count - LANES);
    }
    return ahead;
}

// The rows [first, end) by all panels.
template <class S>
FOR_PRODUCTS void product_of_block(int64_t first, int64_t end, int64_t out, Units units, const Target<S>& target) {
    const int64_t rows = end - first, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t column = 0; column < out; column += PANEL, units.panel += units.count * PANEL) {
        const int64_t count = std::min(out - column, int64_t{PANEL});
        const uint32_t *const next = units.panel + units.count * PANEL, *const behind = next + units.count * PANEL;
        Ahead ahead{reinterpret_cast<const char*>(next),
                    reinterpret_cast<const char*>(column + PANEL < out ? behind : next)};
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = first + rows * t / tiles;
            switch (first + rows * (t + 1) / tiles - row) {
#define TILE(N)     case N: ahead = tile<N, S>(units, ahead, tiles == 1, row, column, count, target); break;
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7)
                TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#undef TILE
            }
        }
    }
}

// Matrix registers (AMX): 16 rows of 64 bytes each.
constexpr int64_t SIDE = 16, UNITS = 16;
// With this number of rows, x stays in the second cache while all panels pass by.
constexpr int64_t MATRIX_ROWS = 256;

// Whether the processor has them, and the system lets this process use them.
bool has_matrices() {
    unsigned a, b, c, d;
    const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    return has && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}

// Registers 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 a panel; `first` and `second` are rows of x.
FOR_MATRICES void configure(int64_t first, int64_t second) {
    alignas(64) struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (const int i : {0, 1, 4}) shapes.rows[i] = static_cast<uint8_t>(first);
    for (const int i : {2, 3, 5}) shapes.rows[i] = static_cast<uint8_t>(second);
    for (const int i : {6, 7}) shapes.rows[i] = UNITS;
    for (int i = 0; i < 8; ++i) shapes.bytes[i] = shapes.rows[i] ? 64 : 0;  // a register of no rows has no bytes
    _tile_loadconfig(&shapes);
}

// Adds to the sums UNITS units of x by those of a panel.
INLINE FOR_MATRICES void add_matrices(const uint32_t* x, int64_t stride, const uint32_t* panel, bool has_second) {
    const long bytes = static_cast<long>(stride) * 4;
    _tile_loadd(6, panel, PANEL * 4);
    _tile_loadd(7, panel + LANES, PANEL * 4);
    _tile_loadd(4, x, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (!has_second) return;
    _tile_loadd(5, x + SIDE * stride, bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// `rows` rows, at most 2 SIDE, by one panel. The last units, fewer than UNITS, are in `rest`, filled up with zeros.
FOR_MATRICES void matrix_tile(Units units, int64_t rows, Units rest, float (*sums)[PANEL]) {
    const bool has_second = rows > SIDE;
    _tile_zero(0);
    _tile_zero(1);
    if (has_second) {
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t u = 0;
    for (; u + UNITS <= units.count; u += UNITS)
        add_matrices(units.x + u, units.stride, units.panel + u * PANEL, has_second);
    if (u < units.count) add_matrices(rest.x, rest.stride, rest.panel, has_second);
    _tile_stored(0, sums[0], sizeof(*sums));
    _tile_stored(1, sums[0] + LANES, sizeof(*sums));
    if (!has_second) return;
    _tile_stored(2, sums[SIDE], sizeof(*sums));
    _tile_stored(3, sums[SIDE] + LANES, sizeof(*sums));
}

// As `product_of`, of bfloat16. A sum goes over the inputs in blocks of 2 UNITS, in their order: the same for each row.
FOR_MATRICES void product_of_matrices(int64_t rows, int64_t out, Units units, const Target<BFloat16>& target) {
    const int64_t left = units.count % UNITS, whole = units.count - left;
    std::vector<uint32_t> rest_x(static_cast<size_t>(left ? MATRIX_ROWS * UNITS : 0));
    uint32_t rest_panel[UNITS * PANEL] = {};
    float sums[2 * SIDE][PANEL];
    const uint32_t* const panels = units.panel;
    int64_t shaped = 0;
    for (int64_t first = 0; first < rows; first += MATRIX_ROWS) {
        const int64_t end = std::min(first + MATRIX_ROWS, rows);
        for (int64_t row = first; left && row < end; ++row)
            std::copy_n(units.x + row * units.stride + whole, left, &rest_x[(row - first) * UNITS]);
        units.panel = panels;
        for (int64_t column = 0; column < out; column += PANEL, units.panel += units.count * PANEL) {
            if (left) std::copy_n(units.panel + whole * PANEL, left * PANEL, rest_panel);
            for (int64_t row = first; row < end; row += 2 * SIDE) {
                const int64_t count = std::min(end - row, 2 * SIDE);
                if (count != shaped) configure(std::min(count, SIDE), std::max(count - SIDE, int64_t{0}));
                shaped = count;
                const Units of_rows{units.x + row * units.stride, units.stride, units.panel, units.count};
                const uint32_t* const rest = left ? &rest_x[(row - first) * UNITS] : nullptr;
                matrix_tile(of_rows, count, {rest, UNITS, rest_panel, UNITS}, sums);
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t c = 0; c < PANEL && column + c < out; c += LANES) {
                        Floats total;
                        load(total, sums[r] + c);
                        target.put(total, row + r, column + c, std::min(out - column - c, int64_t{LANES}));
                    }
            }
        }
    }
    _tile_release();
}

template <class S>
FOR_PRODUCTS void product_by_panels(int64_t rows, int64_t out, Units units, const Target<S>& target) {
    const int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t b = 0; b < blocks; ++b)
        product_of_block<S>(rows * b / blocks, rows * (b + 1) / blocks, out, units, target);
}

#endif

Instructions best() {
#if HAS_VARIANTS
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16"))
        return has_matrices() ? Instructions::amx : Instructions::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Instructions::avx2;
#endif
    return Instructions::any;
}

Instructions used = best();

template <class S>
void product_of(int64_t rows, int64_t out, int64_t in, Matrix x, const void* packed, const void* bias, bool adds,
                Matrix y) {
    const Target<S> target{static_cast<const S*>(bias), adds, y};
#if HAS_VARIANTS
    const Units units{static_cast<const uint32_t*>(x.data), x.stride / PER_UNIT<S>,
                      static_cast<const uint32_t*>(packed), in / PER_UNIT<S>};
    if constexpr (sizeof(S) == sizeof(BFloat16))
        if (used == Instructions::amx) return product_of_matrices(rows, out, units, target);
    if (used >= Instructions::avx512) return product_by_panels(rows, out, units, target);
    if (used == Instructions::avx2)
        return product_by_halves(rows, out, in, x, packed, target, HALF_TILES_OF_AVX2<S>);
#endif
    product_by_halves(rows, out, in, x, packed, target, HALF_TILES<S>);
}

}  // namespace

Instructions use_instructions(Instructions most) { return used = std::min(most, best()); }

int64_t packed_bytes(DType dtype, int64_t out, int64_t in) {
    return (out + PANEL - 1) / PANEL * PANEL * in * (dtype == DType::float32 ? 4 : 2);
}

void pack(DType dtype, int64_t out, int64_t in, Matrix weight, bool by_columns, void* packed) {
    if (dtype == DType::float64) refuse();
    if (by_columns)
        (dtype == DType::float32 ? pack_columns<float> : pack_columns<BFloat16>)(out, in, weight, packed);
    else
        (dtype == DType::float32 ? pack_units<float> : pack_units<BFloat16>)(out, in, weight, packed);
}

void product(DType dtype, int64_t rows, int64_t out, int64_t in, Matrix x, const void* packed, const void* bias,
             bool adds, Matrix y) {
    if (dtype == DType::float64) refuse();
    (dtype == DType::float32 ? product_of<float> : product_of<BFloat16>)(rows, out, in, x, packed, bias, adds, y);
}

}  // namespace kernels
