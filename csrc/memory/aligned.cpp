// Loaded before everything else into a worker process (LD_PRELOAD): aligned memory that malloc can use again.
//
// torch asks for the memory of a tensor on the CPU with posix_memalign. glibc takes a piece that is longer than needed by
// the alignment, and gives its ends back. A freed piece is therefore too short for the next tensor of the same size:
// the heap grows by holes that stay empty, in a training step by up to as much as the step needs. malloc fills holes
// exactly. Its pieces are aligned too where all of them are multiples of the alignment; one that is not is returned,
// and memalign finds another.

#include <malloc.h>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {
constexpr std::size_t kAlignment = 64;        // torch's
constexpr std::size_t kLeastBytes = 1 << 12;  // holes below this are filled by small things
constexpr std::size_t kHeaderBytes = 8;       // glibc's, in front of every piece and counted in its size

bool is_aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}
}  // namespace

extern "C" __attribute__((visibility("default"))) int posix_memalign(void** memory, std::size_t alignment, std::size_t size) noexcept {
  const bool is_power = alignment != 0 && (alignment & (alignment - 1)) == 0;
  if (!is_power || alignment % sizeof(void*) != 0) return EINVAL;
  void* found = nullptr;
  if (alignment <= kAlignment && size >= kLeastBytes && size < SIZE_MAX / 2) {
    size = (size + kHeaderBytes + kAlignment - 1) / kAlignment * kAlignment - kHeaderBytes;
    found = std::malloc(size);
    if (found != nullptr && !is_aligned(found, alignment)) {
      std::free(found);
      found = nullptr;
    }
  }
  if (found == nullptr) found = memalign(alignment, size);
  if (found == nullptr) return ENOMEM;
  *memory = found;
  return 0;
}
