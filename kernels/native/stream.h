// A plain read of memory by all threads: what every kernel bound by memory is measured against.
#pragma once
#include "engine.h"

// Sum of all 64-bit words.
uint64_t stream(Engine& engine, const void* data, size_t bytes);
