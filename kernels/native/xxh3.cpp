// The algorithm and its secret are those of xxHash, whose notice follows.
//
// Header File
// Copyright (C) 2012-2023 Yann Collet
//
// BSD 2-Clause License (https://www.opensource.org/licenses/bsd-license.php)
//
// Redistribution and use in source and binary forms, with or without
// modification, are permitted provided that the following conditions are
// met:
//
//    * Redistributions of source code must retain the above copyright
//      notice, this list of conditions and the following disclaimer.
//    * Redistributions in binary form must reproduce the above
//      copyright notice, this list of conditions and the following disclaimer
//      in the documentation and/or other materials provided with the
//      distribution.
//
// THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS
// "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT
// LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR
// A PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT
// OWNER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
// SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT
// LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE,
// DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY
// THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT
// (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
// OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
//
// You can contact the author at:
//   - xxHash homepage: https://www.xxhash.com
//   - xxHash source repository: https://github.com/Cyan4973/xxHash
#include "xxh3.h"

#include <string.h>

#include "past_caches.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ULL, kPrime64_2 = 0xC2B2AE3D27D4EB4FULL,
                   kPrime64_3 = 0x165667B19E3779F9ULL, kPrime64_4 = 0x85EBCA77C2B2AE63ULL,
                   kPrime64_5 = 0x27D4EB2F165667C5ULL, kMix = 0x165667919E3779F9ULL;
constexpr size_t kSecretBytes = 192, kStripe = 64, kStep = 8;
constexpr size_t kAhead = 2048;  // bytes that are fetched before they are read
constexpr size_t kStripes = (kSecretBytes - kStripe) / kStep;  // between two scrambles
static_assert(Xxh3::kBlock == kStripe * kStripes);

alignas(64) const unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// Little-endian, as everything that afserve runs on.
uint64_t word(const char* at) {
  uint64_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

// What is mixed from one stripe to the next; `stripes` of 64 bytes, each with the secret 8 bytes further on.
using Accumulate = void (*)(uint64_t* acc, const char* data, const char* secret, size_t stripes);

void accumulate(uint64_t* acc, const char* data, const char* secret, size_t stripes) {
  for (size_t s = 0; s < stripes; ++s, data += kStripe, secret += kStep)
    for (int i = 0; i < 8; ++i) {
      uint64_t value = word(data + 8 * i), key = value ^ word(secret + 8 * i);
      acc[i ^ 1] += value;
      acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

void scramble(uint64_t* acc, const char* secret) {
  for (int i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ word(secret + 8 * i)) * kPrime32_1;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i mix(__m256i sum, const char* from, const char* with) {
  __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(with)));
  __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(_mm256_add_epi64(sum, swapped), product);
}

__attribute__((target("avx2"))) void accumulate_avx2(uint64_t* acc, const char* data, const char* secret,
                                                     size_t stripes) {
  auto* sums = reinterpret_cast<__m256i*>(acc);
  __m256i low = _mm256_load_si256(sums), high = _mm256_load_si256(sums + 1);
  for (size_t s = 0; s < stripes; ++s, data += kStripe, secret += kStep) {
    _mm_prefetch(data + 512, _MM_HINT_T0);
    low = mix(low, data, secret);
    high = mix(high, data + 32, secret + 32);
  }
  _mm256_store_si256(sums, low);
  _mm256_store_si256(sums + 1, high);
}
#endif

// A block, which goes to `to` as well.
using Move = void (*)(uint64_t* acc, const char* data, const char* secret, char* to);

void move(uint64_t* acc, const char* data, const char* secret, char* to) {
  memcpy(to, data, Xxh3::kBlock);
  accumulate(acc, to, secret, kStripes);
}

// The same for memory that the processor has not at hand and need not get.
void move_past(uint64_t* acc, const char* data, const char* secret, char* to) {
  copy_past_caches(to, data, Xxh3::kBlock);
  accumulate(acc, data, secret, kStripes);
}

#if defined(__x86_64__)
template <bool kPast>
__attribute__((target("avx2"))) void move_avx2(uint64_t* acc, const char* data, const char* secret, char* to) {
  auto* sums = reinterpret_cast<__m256i*>(acc);
  __m256i low = _mm256_load_si256(sums), high = _mm256_load_si256(sums + 1);
  for (size_t s = 0; s < kStripes; ++s, data += kStripe, to += kStripe, secret += kStep) {
    _mm_prefetch(data + kAhead, _MM_HINT_T0);
    low = mix(low, data, secret);
    high = mix(high, data + 32, secret + 32);
    const auto* here = reinterpret_cast<const __m256i*>(data);
    auto* there = reinterpret_cast<__m256i*>(to);
    for (int half = 0; half < 2; ++half)
      if (kPast)
        _mm256_stream_si256(there + half, _mm256_loadu_si256(here + half));
      else
        _mm256_storeu_si256(there + half, _mm256_loadu_si256(here + half));
  }
  _mm256_store_si256(sums, low);
  _mm256_store_si256(sums + 1, high);
}
#endif

Move widest_move(bool past) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return past ? move_avx2<true> : move_avx2<false>;
#endif
  return past ? move_past : move;
}

const Move best_move = widest_move(false), best_move_past = widest_move(true);

Accumulate widest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return accumulate_avx2;
#endif
  return accumulate;
}

const Accumulate best = widest();

uint64_t folded(uint64_t a, uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

Xxh3::Xxh3(uint64_t seed, size_t bytes)
    : bytes_(bytes),
      acc_{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1} {
  for (size_t at = 0; at < kSecretBytes; at += 16) {
    const char* plain = reinterpret_cast<const char*>(kSecret) + at;
    uint64_t low = word(plain) + seed, high = word(plain + 8) - seed;
    memcpy(secret_ + at, &low, 8);
    memcpy(secret_ + at + 8, &high, 8);
  }
}

void Xxh3::upto(const char* data, size_t there) {
  // The last byte's block is for the end, also where it is whole.
  const size_t whole = (there < bytes_ ? there : bytes_ - 1) / kBlock;
  for (; blocks_ < whole; ++blocks_) {
    best(acc_, data + blocks_ * kBlock, secret_, kStripes);
    scramble(acc_, secret_ + kSecretBytes - kStripe);
  }
}

void Xxh3::copy(const char* data, char* to, size_t there, bool past_caches) {
  const Move move_block = past_caches && reinterpret_cast<uintptr_t>(to) % kStripe == 0 ? best_move_past : best_move;
  for (size_t at = blocks_ * kBlock; at < there; at += kBlock) {
    if (at + kBlock >= bytes_) {  // the end's
      memcpy(to + at, data + at, kBlock);
      return;
    }
    move_block(acc_, data + at, secret_, to + at);
    scramble(acc_, secret_ + kSecretBytes - kStripe);
    ++blocks_;
  }
}

uint64_t Xxh3::end(const char* data) {
  upto(data, bytes_);
  const size_t done = blocks_ * kBlock;
  best(acc_, data + done, secret_, (bytes_ - 1 - done) / kStripe);
  best(acc_, data + bytes_ - kStripe, secret_ + kSecretBytes - kStripe - 7, 1);
  uint64_t hash = bytes_ * kPrime64_1;
  for (int i = 0; i < 4; ++i)
    hash += folded(acc_[2 * i] ^ word(secret_ + 11 + 16 * i), acc_[2 * i + 1] ^ word(secret_ + 11 + 16 * i + 8));
  hash = (hash ^ (hash >> 37)) * kMix;
  return hash ^ (hash >> 32);
}

uint64_t xxh3(const void* data, size_t bytes, uint64_t seed) {
  return Xxh3(seed, bytes).end(static_cast<const char*>(data));
}
