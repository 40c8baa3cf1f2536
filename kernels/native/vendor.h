// Whose processor this is: how far ahead memory is asked for depends on what its cores fetch by themselves. For x86-64.
// Static, since files of different instruction sets must never share a function.
#pragma once

static inline bool is_amd() {
  static const bool amd = (__builtin_cpu_init(), __builtin_cpu_is("amd") != 0);
  return amd;
}
