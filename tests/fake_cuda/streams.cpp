#include "streams.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

namespace fake {
namespace {

constexpr size_t kMaxBurst = 8, kPostsPerBurst = 8;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Streams::set_late(bool late, uint64_t seed) {
  run_all();
  is_late_ = late;
  random_.seed(seed);
}

Mark Streams::post(int slot, std::function<void()> work) {
  Line& line = lines_[slot];
  line.posted++;
  if (!is_late_) {
    line.done = line.posted;
    work();
    return {slot, line.posted};
  }
  line.work.push_back({std::move(work), {}});
  const Mark mark = end_of(slot);
  if (draw(kPostsPerBurst) == 0) {  // the device gets on with something while the host posts
    const int any = static_cast<int>(draw(kSlots));
    for (int near = 0; near < kSlots; near++) {
      const int other = (any + near) % kSlots;
      if (!can_run(other)) continue;
      for (size_t left = 1 + draw(kMaxBurst); left && can_run(other); left--) run_one(other);
      break;
    }
  }
  return mark;
}

std::shared_ptr<Recorded> Streams::record(int slot, const Clock& clock) {
  auto recorded = std::make_shared<Recorded>();
  recorded->clock = clock;
  recorded->mark = {slot, lines_[slot].posted + 1};
  post(slot, [recorded] { recorded->time_ns = now_ns(); });
  return recorded;
}

void Streams::wait(int slot, const Recorded& recorded) {
  if (!is_late_) return;
  lines_[slot].posted++;
  lines_[slot].work.push_back({[] {}, {recorded.mark}});
}

bool Streams::query(Mark mark) {
  if (!is_reached(mark) && draw(2)) run_until(mark);
  return is_reached(mark);
}

void Streams::run_until(Mark mark) {
  if (is_reached(mark)) return;
  if (draw(2)) {
    run_only_what_is_needed(mark);
  } else {
    run_in_random_order(mark);
  }
}

void Streams::run_all() {
  for (int slot = 0; slot < kSlots; slot++) run_until(end_of(slot));
}

bool Streams::can_run(int slot) const {
  const auto& work = lines_[slot].work;
  return !work.empty() &&
         std::all_of(work.front().after.begin(), work.front().after.end(), [&](Mark m) { return is_reached(m); });
}

void Streams::run_one(int slot) {
  Line& line = lines_[slot];
  Work work = std::move(line.work.front());
  line.work.pop_front();
  line.done++;
  work.run();
}

void Streams::run_only_what_is_needed(Mark mark) {
  while (!is_reached(mark)) {
    for (Mark before : std::vector<Mark>(lines_[mark.slot].work.front().after)) run_only_what_is_needed(before);
    run_one(mark.slot);
  }
}

void Streams::run_in_random_order(Mark mark) {
  std::vector<int> order(kSlots);
  std::iota(order.begin(), order.end(), 0);
  while (!is_reached(mark)) {
    std::shuffle(order.begin(), order.end(), random_);  // whose first stream that can run goes ahead of all others
    auto chosen = std::find_if(order.begin(), order.end(), [&](int slot) { return can_run(slot); });
    if (chosen == order.end()) throw std::runtime_error("the fake device waits for itself");
    for (size_t left = 1 + draw(kMaxBurst); left && can_run(*chosen); left--) run_one(*chosen);
  }
}

}  // namespace fake
