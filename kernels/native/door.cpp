#include "door.h"

#if defined(__linux__)
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>

Knocker::~Knocker() {
  if (socket_ >= 0) close(socket_);
}

void Knocker::knock(uint32_t number) {
  if (socket_ < 0) socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  int length = std::snprintf(to.sun_path + 1, sizeof to.sun_path - 1, "afserve-door-%08x", number);  // comm/transports/door.py
  auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  sendto(socket_, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&to), size);
}

bool take_knock(int door) {
  char knock;
  return recv(door, &knock, sizeof knock, MSG_DONTWAIT) >= 0;
}
#else
Knocker::~Knocker() = default;
void Knocker::knock(uint32_t) {}
bool take_knock(int) { return false; }
#endif
