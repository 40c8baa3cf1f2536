// Saved inputs of kernels and what has to come out, as tests/kernels/arm/cases.py writes them: a count of cases; of each
// its op and its tensors; of each tensor a name, a dtype code, its sizes and its bytes. Little-endian, all counts 32 bits.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"

struct Tensor {
  int code = 0;
  std::vector<int> sizes;
  Memory memory;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(const_cast<char*>(memory.data()));
  }
  int size(int dim) const { return sizes.at(dim); }
  size_t count() const {
    size_t all = 1;
    for (int size : sizes) all *= size_t(size);
    return all;
  }
};

class Case {
 public:
  std::string op;
  std::map<std::string, Tensor> tensors;

  bool has(const char* name) const { return tensors.count(name); }
  const Tensor& operator[](const char* name) const {
    auto found = tensors.find(name);
    if (found == tensors.end()) throw std::runtime_error(op + " has no tensor " + name);
    return found->second;
  }
  template <class T>
  T* data(const char* name) const {
    return has(name) ? (*this)[name].as<T>() : nullptr;
  }
  int number(const char* name, int otherwise = 0) const { return has(name) ? data<int32_t>(name)[0] : otherwise; }
  float real(const char* name) const { return (*this)[name].as<float>()[0]; }
};

class CaseFile {
 public:
  explicit CaseFile(const char* path) : file_(fopen(path, "rb")) {
    if (!file_) throw std::runtime_error(std::string("no file ") + path);
  }
  ~CaseFile() { fclose(file_); }
  CaseFile(const CaseFile&) = delete;

  std::vector<Case> all() {
    std::vector<Case> cases(number());
    for (Case& made : cases) {
      made.op = text();
      for (uint32_t n = number(); n; n--) {
        std::string name = text();
        take(made.tensors[name]);
      }
    }
    return cases;
  }

 private:
  void bytes(void* to, size_t count) {
    if (fread(to, 1, count, file_) != count) throw std::runtime_error("a file of cases ends early");
  }
  uint32_t number() {
    uint32_t n;
    bytes(&n, 4);
    return n;
  }
  std::string text() {
    std::string made(number(), ' ');
    bytes(&made[0], made.size());
    return made;
  }
  void take(Tensor& tensor) {
    constexpr size_t item[] = {4, 2, 1, 4, 8, 8};  // float32, bfloat16, int8, int32, int64, float64
    tensor.code = int(number());
    tensor.sizes.resize(number());
    for (int& size : tensor.sizes) size = int(number());
    size_t count = tensor.count() * item[tensor.code];
    tensor.memory.resize(count);
    bytes(tensor.memory.data(), count);
  }

  FILE* file_;
};
