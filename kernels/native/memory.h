// Memory for packed weights and for scratch. Large pieces ask for huge pages: a stream through weights
// touches far more small pages than the processor keeps translations for.
#pragma once
#include <stddef.h>

// Asks for huge pages under [data, data + bytes); a hint that may do nothing. For memory not yet touched.
void prefer_huge_pages(void* data, size_t bytes);

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) { resize(bytes); }
  Memory(Memory&& other) : base_(other.base_), data_(other.data_), bytes_(other.bytes_) {
    other.base_ = other.data_ = nullptr, other.bytes_ = 0;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { release(); }

  // Contents are not kept. New memory is zero.
  void resize(size_t bytes);

  // At least `count` elements, grown when needed; contents are not kept.
  template <class T>
  T* at_least(size_t count) {
    if (count * sizeof(T) > bytes_) resize(count * sizeof(T) + count * sizeof(T) / 4);
    return static_cast<T*>(data_);
  }

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void release();
  void* base_ = nullptr;  // what was allocated; data_ is the first aligned byte of it
  void* data_ = nullptr;
  size_t bytes_ = 0;
};
