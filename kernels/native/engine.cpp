#include "engine.h"

#include <stdexcept>

Engine::Engine(int threads, const std::string& isa_name)
    : isa(find_isa(isa_name.c_str())), pool(threads), worker(size_t(pool.threads())) {
  if (!isa) throw std::invalid_argument("instruction set '" + isa_name + "' does not exist here");
}

void Engine::reserve(size_t bytes) {
  for (Memory& memory : worker) memory.at_least<char>(bytes);
}
