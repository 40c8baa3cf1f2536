// Rules that move states in a paged cache (kernels/delta.py), one token after the other: a token has the same
// bits alone, in a batch and in any chunk of a prompt. Everything is float.
#pragma once
#include "attention.h"
#include "engine.h"

// A state forgets by head or by channel of a key, and what it says for a key is replaced; or it forgets by head and a
// value is added. In the order of kernels/native.py.
enum class DeltaRule { head, channel, sum };

// A layer: sizes as DeltaShape's, and the convolution's taps (taps, channels), the newest token's last. Null, or `bias` of
// the convolution and what a head's value is multiplied by where it is added to what the head reads (`skip`).
struct DeltaNet {
  int key_heads, value_heads, key, value, taps;
  DeltaRule rule;
  const float *conv, *bias, *skip;

  int channels() const { return 2 * key_heads * key + value_heads * value; }
  size_t matrix() const { return size_t(value_heads) * key * value; }
};

// Rows of one call: queries, keys and values before the convolution, contiguous, and what each head, or each of its keys,
// keeps (decay, a logarithm) and replaces or adds (beta). `out` is (tokens, value heads, value).
struct DeltaTokens {
  const float *mixed, *decay, *beta;
  float* out;
};

// State of block b at data + b * stride.
struct States {
  float* data;
  size_t stride;
  int blocks, block_size;
};

// Reads the state of the block before each sequence's first token, and leaves one in each block that is reached. Throws
// std::out_of_range for a block that the cache has not.
void delta(Engine& engine, const DeltaNet& net, const DeltaTokens& rows, const States& states, const Batch& batch);

// The convolution alone, (tokens, channels), of a net without keys, whose states are its last inputs.
void convolve(Engine& engine, const DeltaNet& net, const float* x, float* out, const States& states, const Batch& batch);
