// Streams as queues of work. By default work is done when it is posted; a late device does it when someone waits, in
// an order of the streams that is drawn by a seed and legal by the events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "order.h"

namespace fake {

// A place in a stream: reached when the stream has done `position` units of work.
struct Mark {
  int slot = kHost;
  uint64_t position = 0;
};

// One recording of an event.
struct Recorded {
  Mark mark;
  Clock clock{};
  int64_t time_ns = 0;
};

class Streams {
 public:
  void set_late(bool late, uint64_t seed);
  bool is_late() const { return is_late_; }

  Mark post(int slot, std::function<void()> work);
  std::shared_ptr<Recorded> record(int slot, const Clock& clock);
  void wait(int slot, const Recorded& recorded);

  Mark end_of(int slot) const { return {slot, lines_[slot].posted}; }
  bool is_reached(Mark mark) const { return lines_[mark.slot].done >= mark.position; }
  // Asks whether a mark is reached; a late device may come to it meanwhile.
  bool query(Mark mark);
  void run_until(Mark mark);
  void run_all();

 private:
  struct Work {
    std::function<void()> run;
    std::vector<Mark> after;
  };
  struct Line {
    std::deque<Work> work;
    uint64_t posted = 0, done = 0;
  };

  bool can_run(int slot) const;
  void run_one(int slot);
  void run_only_what_is_needed(Mark mark);
  void run_in_random_order(Mark mark);
  size_t draw(size_t below) { return static_cast<size_t>(random_() % below); }

  std::vector<Line> lines_{kSlots};
  bool is_late_ = false;
  std::mt19937_64 random_;
};

}  // namespace fake
