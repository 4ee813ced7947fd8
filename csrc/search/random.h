// Random numbers that are the same on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace realhf::search {

// splitmix64; the standard distributions may differ between libraries, and plans must be reproducible.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ULL);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
        return z ^ (z >> 31);
    }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)
    int below(std::size_t n) { return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32); }
    int pick(const std::vector<int>& values) { return values[below(values.size())]; }

private:
    std::uint64_t state_;
};

}  // namespace realhf::search
