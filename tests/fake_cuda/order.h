// Who may touch which bytes: vector clocks over the host and all streams, and for each piece of memory its last writer
// and all readers since (FastTrack, Flanagan and Freund 2009, with the readers kept).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

constexpr int kDevices = 4, kStreams = 32, kHost = 0, kSlots = 1 + kDevices * kStreams;
using Clock = std::array<uint64_t, kSlots>;

inline int slot_of(int device, int64_t stream) {
  return 1 + device * kStreams + static_cast<int>(stream);
}

struct Stamp {
  int slot;
  uint64_t time;
};

// A range of bytes that have been accessed alike.
struct Cell {
  Stamp writer{kHost, 0};
  std::string writer_name;
  std::vector<Stamp> readers;
};

// Memory of the device, or pinned memory of the host.
struct Block {
  size_t size = 0;
  bool is_pinned = false;
  std::map<size_t, Cell> cells;  // by the offset at which each begins; the last one ends with the block
};

struct Bytes {
  const char* begin;
  const char* end;
};

// A message under way, which MPI may read or write at any time.
struct Message {
  Bytes bytes;
  bool writes;
  std::string name;
};

class Order {
 public:
  void add_block(const void* begin, size_t size, bool is_pinned);
  void remove_block(const void* begin);
  bool is_pinned(const void* place);

  // Begins a new unit of work of a stream, which is after everything that the host knows.
  Clock& begin_work(int slot);
  void host_joins(const Clock& clock);
  void stream_joins(int slot, const Clock& clock);
  const Clock& clock(int slot) const { return clocks_[slot]; }

  void access(int slot, Bytes bytes, bool writes, const std::string& name);
  void host_access(Bytes bytes, bool writes, const std::string& name);
  int64_t begin_message(Bytes bytes, bool writes, const std::string& name);
  void end_message(int64_t id);
  void forget_message(int64_t id) { messages_.erase(id); }

  std::vector<std::string> races;

 private:
  std::map<const char*, Block>::iterator find(const char* place);
  void access_cell(int slot, Cell& cell, bool writes, const std::string& name);
  void report(std::string race);

  std::array<Clock, kSlots> clocks_{};
  std::map<const char*, Block> blocks_;
  std::map<int64_t, Message> messages_;
  int64_t next_message_ = 1;
};

}  // namespace fake
