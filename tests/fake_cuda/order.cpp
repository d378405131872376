#include "order.h"

#include <algorithm>

namespace fake {
namespace {

constexpr size_t kMaxRaces = 1000;

void join(Clock& into, const Clock& from) {
  for (int slot = 0; slot < kSlots; slot++) into[slot] = std::max(into[slot], from[slot]);
}

std::string name_of(int slot) {
  if (slot == kHost) return "the host";
  const int device = (slot - 1) / kStreams, stream = (slot - 1) % kStreams;
  return (device ? "cuda:" + std::to_string(device) + " " : std::string()) + "stream " + std::to_string(stream);
}

// Makes a cell begin at `offset`.
std::map<size_t, Cell>::iterator cut(std::map<size_t, Cell>& cells, size_t offset) {
  auto next = cells.lower_bound(offset);
  if (next != cells.end() && next->first == offset) return next;
  return cells.emplace_hint(next, offset, std::prev(next)->second);
}

}  // namespace

void Order::add_block(const void* begin, size_t size, bool is_pinned) {
  const char* first = static_cast<const char*>(begin);
  auto next = blocks_.lower_bound(first);
  while (next != blocks_.end() && next->first < first + size) next = blocks_.erase(next);
  Block block{size, is_pinned, {}};
  block.cells[0];
  blocks_[first] = std::move(block);
}

void Order::remove_block(const void* begin) { blocks_.erase(static_cast<const char*>(begin)); }

bool Order::is_pinned(const void* place) {
  auto found = find(static_cast<const char*>(place));
  return found != blocks_.end() && found->second.is_pinned;
}

std::map<const char*, Block>::iterator Order::find(const char* place) {
  auto found = blocks_.upper_bound(place);
  if (found == blocks_.begin()) return blocks_.end();
  --found;
  return place < found->first + found->second.size ? found : blocks_.end();
}

Clock& Order::begin_work(int slot) {
  join(clocks_[slot], clocks_[kHost]);
  clocks_[slot][slot]++;
  return clocks_[slot];
}

void Order::host_joins(const Clock& clock) { join(clocks_[kHost], clock); }

void Order::stream_joins(int slot, const Clock& clock) {
  join(clocks_[slot], clocks_[kHost]);
  join(clocks_[slot], clock);
}

void Order::report(std::string race) {
  if (races.size() < kMaxRaces) races.push_back(std::move(race));
}

void Order::access_cell(int slot, Cell& cell, bool writes, const std::string& name) {
  const Clock& now = clocks_[slot];
  const std::string me = name + " on " + name_of(slot) + (writes ? " writes" : " reads");
  if (cell.writer.slot != slot && cell.writer.time > now[cell.writer.slot])
    report(me + " what " + cell.writer_name + " on " + name_of(cell.writer.slot) + " may still be writing");
  if (writes) {
    for (const Stamp& reader : cell.readers)
      if (reader.slot != slot && reader.time > now[reader.slot])
        report(me + " what " + name_of(reader.slot) + " may still be reading");
    return;
  }
  for (Stamp& reader : cell.readers)
    if (reader.slot == slot) {
      reader.time = now[slot];
      return;
    }
  cell.readers.push_back({slot, now[slot]});
}

void Order::access(int slot, Bytes bytes, bool writes, const std::string& name) {
  auto found = bytes.begin < bytes.end ? find(bytes.begin) : blocks_.end();
  if (found == blocks_.end()) return;
  for (const auto& [id, message] : messages_)
    if ((writes || message.writes) && bytes.begin < message.bytes.end && message.bytes.begin < bytes.end)
      report(name + " on " + name_of(slot) + (writes ? " writes" : " reads") + " what " + message.name +
             (message.writes ? " may still be writing" : " may still be reading"));
  Block& block = found->second;
  const size_t begin = bytes.begin - found->first;
  const size_t end = std::min<size_t>(bytes.end - found->first, block.size);
  auto first = cut(block.cells, begin);
  auto last = end == block.size ? block.cells.end() : cut(block.cells, end);
  for (auto cell = first; cell != last; ++cell) access_cell(slot, cell->second, writes, name);
  if (writes) {  // the range is one cell again
    first->second = Cell{{slot, clocks_[slot][slot]}, name, {}};
    block.cells.erase(std::next(first), last);
  }
}

void Order::host_access(Bytes bytes, bool writes, const std::string& name) {
  clocks_[kHost][kHost]++;
  access(kHost, bytes, writes, name);
}

int64_t Order::begin_message(Bytes bytes, bool writes, const std::string& name) {
  host_access(bytes, writes, name);
  messages_[next_message_] = Message{bytes, writes, name};
  return next_message_++;
}

void Order::end_message(int64_t id) {
  auto found = messages_.find(id);
  if (found == messages_.end()) return;
  const Message message = found->second;
  messages_.erase(found);
  host_access(message.bytes, message.writes, message.name);
}

}  // namespace fake
