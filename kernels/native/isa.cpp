// Which instruction sets this processor and this operating system allow, best first.
#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>
#endif

const Isa* generic_isa();
const Isa* avx2_isa();
const Isa* avx512_isa();
const Isa* avx512bf16_isa();
const Isa* avx512bf16fma_isa();
const Isa* amx_isa();
const Isa* sve_isa();
const Isa* neon_isa();
const Isa* neonbf16_isa();

namespace {

#if defined(__x86_64__)

// Linux grants the 8 KiB of tile state per process, on request.
bool tiles_granted() {
#if defined(__linux__)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// Leaf 7, sub-leaf 0, EDX: bit 22 AMX-BF16, bit 24 AMX-TILE, bit 25 AMX-INT8. Compilers differ in the names they give
// these.
bool has_tiles() {
  constexpr unsigned all = 1u << 22 | 1u << 24 | 1u << 25;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all && tiles_granted();
}

// Leaf 7, sub-leaf 1, EAX: bit 5 AVX512-BF16.
bool has_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

// Intel's: measured on one, a VDPBF16PS takes the time of four FMAs (gemm_avx512fma.h). The bits are the same, so only
// speed depends on this.
bool has_slow_dots() {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && d == signature_INTEL_edx &&
         c == signature_INTEL_ecx;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#elif defined(__linux__) && defined(__aarch64__)
// Bits of Linux's HWCAP and HWCAP2.
bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_bf16_and_i8mm() {
  constexpr unsigned long both = 1ul << 13 | 1ul << 14;
  return has_dot_products() && (getauxval(AT_HWCAP2) & both) == both;
}
// Also SVE's own of both, with vectors of 32 bytes: shorter ones are no longer than NEON's.
bool has_sve() {
  constexpr unsigned long both = 1ul << 9 | 1ul << 12;
  constexpr int get_length = 51, length_mask = 0xffff;
  if (!has_bf16_and_i8mm() || !(getauxval(AT_HWCAP) >> 22 & 1) || (getauxval(AT_HWCAP2) & both) != both) return false;
  int length = prctl(get_length);
  return length > 0 && (length & length_mask) == 32;
}
#elif defined(__APPLE__) && defined(__aarch64__)
bool has_feature(const char* name) {
  int there = 0;
  size_t size = sizeof there;
  return sysctlbyname(name, &there, &size, nullptr, 0) == 0 && there;
}
bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_bf16_and_i8mm() {
  return has_dot_products() && has_feature("hw.optional.arm.FEAT_BF16") && has_feature("hw.optional.arm.FEAT_I8MM");
}
#elif defined(__aarch64__)
bool has_dot_products() { return false; }
bool has_bf16_and_i8mm() { return false; }
#endif

struct Choice {
  const Isa* (*table)();
  bool (*works)();
};

const Choice choices[] = {
#if defined(__x86_64__)
    {amx_isa, [] { return has_avx512() && has_bf16() && has_tiles(); }},
    {avx512bf16fma_isa, [] { return has_avx512() && has_bf16() && has_slow_dots(); }},
    {avx512bf16_isa, [] { return has_avx512() && has_bf16(); }},
    {avx512_isa, has_avx512},
    {avx2_isa, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#elif defined(__aarch64__)
#if defined(__linux__)
    {sve_isa, has_sve},
#endif
    {neonbf16_isa, has_bf16_and_i8mm},
    {neon_isa, has_dot_products},
#endif
    {generic_isa, [] { return true; }},
};

}  // namespace

const Isa* find_isa(const char* name) {
  for (const Choice& choice : choices) {
    if (!choice.works()) continue;
    const Isa* isa = choice.table();
    if (!*name || !strcmp(isa->name, name)) return isa;
  }
  return nullptr;
}
