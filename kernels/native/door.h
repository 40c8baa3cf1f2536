// How to wake a waiter that sleeps in files: a datagram to the socket that it has bound, its door, by a number.
//
// A socket in the abstract namespace leaves no file. Anybody of the host may knock, which costs the waiter a look.
#pragma once
#include <cstdint>

// Whoever knocks. It never blocks: where the other end has too many knocks to take one more, it is awake or will be.
class Knocker {
 public:
  Knocker() = default;
  Knocker(const Knocker&) = delete;
  ~Knocker();
  void knock(uint32_t number);

 private:
  int socket_ = -1;  // opened when it is first needed
};

// Takes one knock; false where there is none.
bool take_knock(int door);
