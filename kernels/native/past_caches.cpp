#include "past_caches.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr int64_t kLine = 64;

void stream_lines(char* to, const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
}

__attribute__((target("avx512f"))) void stream_whole_lines(char* to, const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
}

}  // namespace

bool past_caches() {
    static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
    return amd;
}

void copy_past_caches(char* to, const char* from, int64_t bytes) {
    static const auto stream = (__builtin_cpu_init(), __builtin_cpu_supports("avx512f")) ? stream_whole_lines : stream_lines;
    int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
    int64_t lines = (bytes - head) / kLine * kLine;
    std::memcpy(to, from, head);
    stream(to + head, from + head, lines);
    std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
}

void settle_past_caches() { _mm_sfence(); }

#else

bool past_caches() { return false; }
void copy_past_caches(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }
void settle_past_caches() {}

#endif
