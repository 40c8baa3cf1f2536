// Copies that go past the caches to memory, for rows that another core reads next.
#pragma once
#include <cstdint>

// Whether that is the quicker way between two cores here. On AMD's processors a line that is in another core's cache
// comes slower than from memory; Intel's have not shown it.
bool past_caches();

// What was copied may be seen late and out of order until `settle_past_caches`.
void copy_past_caches(char* to, const char* from, int64_t bytes);
void settle_past_caches();
