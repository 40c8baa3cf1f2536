#include "engine.h"

#include <stdexcept>
#include <utility>

namespace {

const Isa* required(const std::string& name) {
  const Isa* isa = find_isa(name.c_str());
  if (!isa) throw std::invalid_argument("instruction set '" + name + "' does not exist here");
  return isa;
}

}  // namespace

Engine::Engine(int threads, const std::string& isa_name)
    : isa(required(isa_name)), pool(threads, isa->enter, isa->leave), worker(size_t(pool.threads())) {}

void Engine::reserve(size_t bytes) {
  for (Memory& memory : worker) memory.at_least<char>(bytes);
}

void Engine::borrow(const LentCore& core, std::shared_ptr<void> memory) {
  pool.borrow(core);
  lent_memory = std::move(memory);
  worker.resize(size_t(pool.threads()));
}
