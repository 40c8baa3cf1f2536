// One pass over many blocks of KV: read or taken from memory, checked, and copied to where a cache has them.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "block_order.h"

// What a block has to be: its place in the cache, the seed and the checksum of its bytes.
struct Expected {
  size_t block;
  uint64_t seed, sum;
};

// Blocks lie `pitch` bytes apart from `offset` on in an open file, which is read a window of memory at a time. `right`
// gets whether each came whole with its checksum; only those are copied. The bytes that came, or -errno.
int64_t read_blocks(int file, int64_t offset, size_t pitch, char* window, size_t window_bytes,
                    const std::vector<Part>& parts, const std::vector<Expected>& wanted, std::vector<bool>& right);

// The same from memory, each block from an address of its own.
void put_blocks(const std::vector<const char*>& from, const std::vector<Part>& parts,
                const std::vector<Expected>& wanted, std::vector<bool>& right);

// Copies blocks of a cache to memory, each to an address of its own. Their checksums, by seeds.
std::vector<uint64_t> take_blocks(const std::vector<Part>& parts, const std::vector<size_t>& blocks,
                                  const std::vector<char*>& to, const std::vector<uint64_t>& seeds);

// Copies blocks that lie one behind the other into a cache, right or not. The checksums of what was there, by seeds.
std::vector<uint64_t> fill_blocks(const char* from, const std::vector<Part>& parts, const std::vector<size_t>& blocks,
                                  const std::vector<uint64_t>& seeds);
