// Several arrays in one piece of memory, each on its own cache line.
#pragma once
#include <stddef.h>

class Carver {
 public:
  explicit Carver(char* memory) : at_(memory) {}
  template <class T>
  T* take(size_t count) {
    T* piece = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  char* at_;
};
