#include "blocks.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "bind.h"
#include "past_caches.h"
#include "xxh3.h"

namespace {

size_t bytes_of(const std::vector<Part>& parts) {
  size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return bytes;
}

// Calls `move(part, its memory, outside, bytes)` for all of a block, in units; `outside` goes on with it.
template <class Bytes, class Move>
void each_unit(const std::vector<Part>& parts, size_t block, Bytes* outside, Move move) {
  for (const Part& part : parts) {
    char* memory = part.block(block);
    const size_t unit = unit_of(part);
    for (size_t at = 0; at < part.bytes; at += unit) {
      const size_t bytes = std::min(unit, part.bytes - at);
      move(part, memory + at, outside, bytes);
      outside += bytes;
    }
  }
}

constexpr size_t kNear = 16 << 10;  // of tiles, in the order that they have outside or in a cache

// To a cache, where nobody reads it soon.
void put_unit(const Part& part, const char* outside, char* memory, size_t bytes) {
  alignas(64) char near[kNear];
  if (part.layout == Layout::rows) return copy_past_caches(memory, outside, bytes);
  if (bytes > kNear) return move_in(part, outside, memory, bytes);
  move_in(part, outside, near, bytes);
  copy_past_caches(memory, near, bytes);
}

void copy_in(const std::vector<Part>& parts, size_t block, const char* from) {
  each_unit(parts, block, from, [](const Part& part, char* memory, const char* outside, size_t bytes) {
    put_unit(part, outside, memory, bytes);
  });
  settle_past_caches();
}

// Checked while its bytes are on their way through the processor's caches, then copied from there.
bool put(const char* from, size_t bytes, const std::vector<Part>& parts, const Expected& wanted) {
  if (xxh3(from, bytes, wanted.seed) != wanted.sum) return false;
  copy_in(parts, wanted.block, from);
  return true;
}

// Whether all of a block's bytes lie in rows, in whole blocks of the checksum: then one pass copies and hashes.
bool in_one_pass(const std::vector<Part>& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) {
    return part.layout == Layout::rows && part.bytes % Xxh3::kBlock == 0;
  });
}

// Whether each unit of it is whole blocks of the checksum, and can be put in order before it goes further.
bool in_whole_units(const std::vector<Part>& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) {
    const size_t unit = std::min(unit_of(part), part.bytes);
    return unit <= kNear && unit % Xxh3::kBlock == 0 && part.bytes % unit == 0;
  });
}

// A block and its checksum where another core reads it next, which on some processors goes past the caches.
uint64_t take_past(const std::vector<Part>& parts, size_t bytes, size_t block, char* to, uint64_t seed) {
  alignas(64) char near[kNear];
  const char* from = near;  // so that `from + before` is the unit that is hashed
  Xxh3 sum(seed, bytes);
  each_unit(parts, block, to, [&](const Part& part, const char* memory, char* outside, size_t count) {
    const size_t before = outside - to;
    move_out(part, memory, near, count);
    from = near - before;
    sum.upto(from, before + count);
    copy_past_caches(outside, near, count);
  });
  settle_past_caches();
  return sum.end(from);
}

// A block and its checksum, unit by unit.
uint64_t take(const std::vector<Part>& parts, size_t bytes, size_t block, char* to, uint64_t seed) {
  const bool once = in_one_pass(parts), past = past_caches();
  if (past && !once && in_whole_units(parts)) return take_past(parts, bytes, block, to, seed);
  Xxh3 sum(seed, bytes);
  each_unit(parts, block, to, [&](const Part& part, const char* memory, char* outside, size_t count) {
    const size_t before = outside - to;
    if (once) return sum.copy(memory - before, to, before + count, past);
    move_out(part, memory, outside, count);
    sum.upto(to, before + count);
  });
  settle_past_caches();
  return sum.end(to);
}

uint64_t fill(const std::vector<Part>& parts, size_t bytes, size_t block, const char* from, uint64_t seed) {
  Xxh3 sum(seed, bytes);
  const bool once = in_one_pass(parts);
  each_unit(parts, block, from, [&](const Part& part, char* memory, const char* outside, size_t count) {
    const size_t before = outside - from;
    if (once) return sum.copy(from, memory - before, before + count, true);
    sum.upto(from, before + count);
    put_unit(part, outside, memory, count);
  });
  settle_past_caches();
  return sum.end(from);
}

// Fewer bytes than asked only where the file ends; -errno.
int64_t read_all(int file, char* to, size_t bytes, int64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    ssize_t came = pread(file, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (came < 0 && errno == EINTR) continue;
    if (came < 0) return -errno;
    if (came == 0) break;
    done += came;
  }
  return done;
}

using PlainPart = std::tuple<Address, size_t, size_t, int, int, int>;
using PlainExpected = std::tuple<size_t, uint64_t, uint64_t>;

Part part_of(const PlainPart& plain) {
  const auto& [base, bytes, pitch, layout, size, item] = plain;
  Part part{at<char>(base), bytes, pitch, static_cast<Layout>(layout), size, item};
  if (layout < 0 || layout > 2 || pitch < bytes) throw std::invalid_argument("a part of a cache that cannot be");
  if (part.layout != Layout::rows)
    if (size < 1 || size % 16 || (item != 2 && item != 4) || bytes % unit_of(part))
      throw std::invalid_argument("tiles that cannot be");
  return part;
}

std::vector<Part> parts_of(const std::vector<PlainPart>& plain) {
  std::vector<Part> parts;
  for (const PlainPart& one : plain) parts.push_back(part_of(one));
  if (bytes_of(parts) < kLeastHashed) throw std::invalid_argument("blocks of fewer than 241 bytes");
  return parts;
}

std::vector<Expected> expected_of(const std::vector<PlainExpected>& plain) {
  std::vector<Expected> wanted;
  for (const auto& [block, seed, sum] : plain) wanted.push_back({block, seed, sum});
  return wanted;
}

template <class T>
std::vector<T*> pointers(const std::vector<Address>& plain) {
  std::vector<T*> found;
  for (Address one : plain) found.push_back(at<T>(one));
  return found;
}

char* piece_of(const py::buffer& buffer, bool written, size_t bytes) {
  py::buffer_info info = buffer.request(written);
  if (static_cast<size_t>(info.size * info.itemsize) < bytes) throw std::invalid_argument("too little memory");
  return static_cast<char*>(info.ptr);
}

void check_counts(size_t one, size_t other) {
  if (one != other) throw std::invalid_argument("as many addresses as blocks are needed");
}

}  // namespace

int64_t read_blocks(int file, int64_t offset, size_t pitch, char* window, size_t window_bytes,
                    const std::vector<Part>& parts, const std::vector<Expected>& wanted, std::vector<bool>& right) {
  const size_t bytes = bytes_of(parts), at_once = std::max<size_t>(1, window_bytes / pitch);
  int64_t total = 0;
  right.assign(wanted.size(), false);
  for (size_t first = 0; first < wanted.size(); first += at_once) {
    const size_t count = std::min(at_once, wanted.size() - first);
    const int64_t came = read_all(file, window, count * pitch, offset + static_cast<int64_t>(first * pitch));
    if (came < 0) return came;
    total += came;
    for (size_t i = 0; i < count && i * pitch + bytes <= static_cast<size_t>(came); ++i)
      right[first + i] = put(window + i * pitch, bytes, parts, wanted[first + i]);
    if (static_cast<size_t>(came) < count * pitch) break;
  }
  return total;
}

void put_blocks(const std::vector<const char*>& from, const std::vector<Part>& parts,
                const std::vector<Expected>& wanted, std::vector<bool>& right) {
  const size_t bytes = bytes_of(parts);
  right.assign(wanted.size(), false);
  for (size_t i = 0; i < wanted.size(); ++i) right[i] = put(from[i], bytes, parts, wanted[i]);
}

std::vector<uint64_t> take_blocks(const std::vector<Part>& parts, const std::vector<size_t>& blocks,
                                  const std::vector<char*>& to, const std::vector<uint64_t>& seeds) {
  const size_t bytes = bytes_of(parts);
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < blocks.size(); ++i) sums.push_back(take(parts, bytes, blocks[i], to[i], seeds[i]));
  return sums;
}

std::vector<uint64_t> fill_blocks(const char* from, const std::vector<Part>& parts, const std::vector<size_t>& blocks,
                                  const std::vector<uint64_t>& seeds) {
  const size_t bytes = bytes_of(parts);
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < blocks.size(); ++i) sums.push_back(fill(parts, bytes, blocks[i], from + i * bytes, seeds[i]));
  return sums;
}

void bind_blocks(py::module_& m) {
  m.def("xxh3", [](py::buffer data, uint64_t seed) {
    py::buffer_info info = data.request();
    const size_t bytes = static_cast<size_t>(info.size * info.itemsize);
    if (bytes < kLeastHashed) throw std::invalid_argument("fewer than 241 bytes");
    return xxh3(info.ptr, bytes, seed);
  });
  m.def("read_blocks", [](int file, int64_t offset, size_t pitch, py::buffer window,
                          const std::vector<PlainPart>& plain, const std::vector<PlainExpected>& expected) {
    py::buffer_info info = window.request(true);
    const size_t window_bytes = static_cast<size_t>(info.size * info.itemsize);
    std::vector<Part> parts = parts_of(plain);
    std::vector<Expected> wanted = expected_of(expected);
    if (pitch < bytes_of(parts) || window_bytes < pitch) throw std::invalid_argument("a pitch or window too small");
    std::vector<bool> right;
    int64_t came;
    {
      py::gil_scoped_release released;
      came = read_blocks(file, offset, pitch, static_cast<char*>(info.ptr), window_bytes, parts, wanted, right);
    }
    return std::make_pair(came, right);
  });
  m.def("put_blocks", [](const std::vector<Address>& from, const std::vector<PlainPart>& plain,
                         const std::vector<PlainExpected>& expected) {
    check_counts(from.size(), expected.size());
    std::vector<Part> parts = parts_of(plain);
    std::vector<Expected> wanted = expected_of(expected);
    std::vector<bool> right;
    py::gil_scoped_release released;
    put_blocks(pointers<const char>(from), parts, wanted, right);
    return right;
  });
  m.def("take_blocks", [](const std::vector<PlainPart>& plain, const std::vector<size_t>& blocks,
                          const std::vector<Address>& to, const std::vector<uint64_t>& seeds) {
    check_counts(to.size(), blocks.size());
    check_counts(seeds.size(), blocks.size());
    std::vector<Part> parts = parts_of(plain);
    py::gil_scoped_release released;
    return take_blocks(parts, blocks, pointers<char>(to), seeds);
  });
  m.def("take_piece", [](const std::vector<PlainPart>& plain, const std::vector<size_t>& blocks, py::buffer into,
                         const std::vector<uint64_t>& seeds) {
    check_counts(seeds.size(), blocks.size());
    std::vector<Part> parts = parts_of(plain);
    char* base = piece_of(into, true, blocks.size() * bytes_of(parts));
    std::vector<char*> to;
    for (size_t i = 0; i < blocks.size(); ++i) to.push_back(base + i * bytes_of(parts));
    py::gil_scoped_release released;
    return take_blocks(parts, blocks, to, seeds);
  });
  m.def("fill_piece", [](py::buffer from, const std::vector<PlainPart>& plain, const std::vector<size_t>& blocks,
                         const std::vector<uint64_t>& seeds) {
    check_counts(seeds.size(), blocks.size());
    std::vector<Part> parts = parts_of(plain);
    const char* base = piece_of(from, false, blocks.size() * bytes_of(parts));
    py::gil_scoped_release released;
    return fill_blocks(base, parts, blocks, seeds);
  });
}
