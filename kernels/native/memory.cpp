#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t HUGE = size_t(1) << 21;

}  // namespace

void Memory::release() {
  free(data_);
  data_ = nullptr;
  bytes_ = 0;
}

void Memory::resize(size_t bytes) {
  release();
  size_t align = bytes >= HUGE ? HUGE : 64;
  size_t size = (bytes + align - 1) / align * align;
  if (!size) return;
  data_ = aligned_alloc(align, size);
  if (!data_) throw std::bad_alloc();
#if defined(__linux__)
  if (align == HUGE) madvise(data_, size, MADV_HUGEPAGE);
#endif
  memset(data_, 0, size);
  bytes_ = size;
}
