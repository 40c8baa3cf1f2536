// XXH3, 64 bits, with a seed: the checksum of blocks of KV. For at least 241 bytes, where it gives what xxhash gives.
#pragma once
#include <stddef.h>
#include <stdint.h>

constexpr size_t kLeastHashed = 241;

// Of `bytes` at one address that come bit by bit, so that each is hashed while the processor has it at hand.
class Xxh3 {
 public:
  Xxh3(uint64_t seed, size_t bytes);
  // The first `there` of them, never fewer than before.
  void upto(const char* data, size_t there);
  // The same, and each byte that was not hashed before is copied to the same distance behind `to`, so that it is read
  // once. `there`, and what was there before, have to be multiples of `kBlock`. Past the caches it is as in
  // past_caches.h, and whoever ends the copy settles it.
  void copy(const char* data, char* to, size_t there, bool past_caches = false);
  static constexpr size_t kBlock = 1024;
  // All are there.
  uint64_t end(const char* data);

 private:
  static constexpr size_t kSecretBytes = 192;
  size_t bytes_, blocks_ = 0;
  alignas(64) char secret_[kSecretBytes];
  alignas(64) uint64_t acc_[8];
};

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed);
