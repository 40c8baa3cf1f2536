// XXH3, 64 bits, with a seed: the checksum of blocks of KV. For at least 241 bytes, where it gives what xxhash gives.
#pragma once
#include <stddef.h>
#include <stdint.h>

constexpr size_t kLeastHashed = 241;

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed);
