#include "memory.h"

#include <stdint.h>
#include <stdlib.h>

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t HUGE = size_t(1) << 21;

}  // namespace

void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t page = 4096;
  uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

void Memory::release() {
  free(base_);
  base_ = data_ = nullptr;
  bytes_ = 0;
}

void Memory::resize(size_t bytes) {
  release();
  size_t align = bytes >= HUGE ? HUGE : 64;
  size_t size = (bytes + align - 1) / align * align;
  if (!size) return;
  base_ = calloc(1, size + align);  // the system's own zeros: a page that is never written takes no memory
  if (!base_) throw std::bad_alloc();
  data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(base_) + align - 1) / align * align);
  if (align == HUGE) prefer_huge_pages(data_, size);
  bytes_ = size;
}
