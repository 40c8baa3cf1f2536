// Addresses as integers: how Python hands memory over.
#pragma once
#include <cstdint>

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
