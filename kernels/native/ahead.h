// The cache lines that will be needed next, asked for a few at a time: a core keeps some 16 under way, and whatever
// follows a longer run of requests waits for them. Blocks of a paged cache lie anywhere, so no processor guesses them.
#pragma once
#include <stddef.h>

class Ahead {
 public:
  void clear() { pieces_ = piece_ = 0; }

  // Pieces that touch become one. Beyond MOST they are not asked for: that costs time, never a result.
  void add(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    int lines = int((bytes + 63) / 64);
    if (pieces_ && pieces_at_[pieces_ - 1].data + pieces_at_[pieces_ - 1].lines * 64 == from)
      pieces_at_[pieces_ - 1].lines += lines;
    else if (pieces_ < MOST)
      pieces_at_[pieces_++] = {from, lines};
  }

  void take(int lines) {
    while (piece_ < pieces_ && lines > 0) {
      Piece& p = pieces_at_[piece_];
      int n = p.lines < lines ? p.lines : lines;
      const char* data = p.data;
      for (int i = 0; i < n; i++) __builtin_prefetch(data + i * 64, 0, 2);
      p.data = data + n * 64;
      p.lines -= n;
      lines -= n;
      if (!p.lines) piece_++;
    }
  }

 private:
  static constexpr int MOST = 64;
  struct Piece {
    const char* data;
    int lines;
  };
  Piece pieces_at_[MOST];
  int pieces_ = 0, piece_ = 0;
};
