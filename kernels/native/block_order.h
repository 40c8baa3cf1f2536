// A block of KV between a cache's memory, in rows or tiles (tiles.h), and bytes in the order that they have outside:
// token after token of a head. Both ways move elements and compute nothing.
#pragma once
#include <stddef.h>

#include "tiles.h"

// Of a cache's tensor: where its first block begins, how many bytes of a block are there and from one to the next, and
// how they lie. In tiles, `size` elements of `item` bytes are a token's of a head; in rows neither is read.
struct Part {
  char* base;
  size_t bytes, pitch;
  Layout layout = Layout::rows;
  int size = 0, item = 0;

  char* block(size_t number) const { return base + number * pitch; }
};

// What is moved at once: as many bytes lie together on both sides, and stay in the processor's nearest cache.
size_t unit_of(const Part& part);

// A unit, or less where a block's rows end.
void move_out(const Part& part, const char* memory, char* outside, size_t bytes);
void move_in(const Part& part, const char* outside, char* memory, size_t bytes);
