#include "streams.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include <c10/util/Exception.h>

namespace simulation {
namespace {

using Clock = std::vector<uint64_t>;  // by stream: the time up to which its work is known

struct RecordedEvent {
  Clock clock;
  int device;
};

std::mutex& ordering = *new std::mutex;
std::vector<Clock>& clocks = *new std::vector<Clock>;  // by stream: its clock
Clock& host = *new Clock;                              // clock of the host, which all streams know
std::vector<std::vector<Use>>& returned = *new std::vector<std::vector<Use>>;  // by stream: uses of memory that was freed to it
std::vector<int>& made_on = *new std::vector<int>;  // device of each stream, by its id minus 1
thread_local std::array<c10::StreamId, kDevices> chosen{};

int number_of(c10::Stream stream) {  // the default stream of each device comes first
  return stream.id() == 0 ? stream.device_index() : kDevices + static_cast<int>(stream.id()) - 1;
}

int device_of(int stream) { return stream < kDevices ? stream : made_on[stream - kDevices]; }

std::string name_of(int stream) {
  return stream < kDevices ? c10::str("the default stream of sim:", stream) : c10::str("stream ", stream - kDevices + 1);
}

Clock& clock_of(int stream) {
  if (clocks.size() <= static_cast<size_t>(stream)) clocks.resize(stream + 1);
  auto& clock = clocks[stream];
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  return clock;
}

void learn(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool knows(int stream, const Use& use) {
  if (use.stream < 0 || use.stream == stream) return true;
  const auto& clock = clock_of(stream);
  return clock.size() > static_cast<size_t>(use.stream) && clock[use.stream] >= use.time;
}

uint64_t tick(int stream) {
  auto& clock = clock_of(stream);
  learn(clock, host);
  return ++clock[stream];
}

void note(std::vector<Use>& uses, Use use) {
  for (auto& known : uses)
    if (known.stream == use.stream) {
      known = use;
      return;
    }
  uses.push_back(use);
}

}  // namespace

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, chosen[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  chosen[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(int device) {
  std::lock_guard<std::mutex> lock(ordering);
  made_on.push_back(device);
  return c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, static_cast<int64_t>(made_on.size()));
}

void record_event(void** event, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(ordering);
  if (*event == nullptr) *event = new RecordedEvent;
  tick(number_of(stream));
  *static_cast<RecordedEvent*>(*event) = {clock_of(number_of(stream)), stream.device_index()};
}

void destroy_event(void* event) { delete static_cast<RecordedEvent*>(event); }

int device_of_event(void* event) { return event ? static_cast<RecordedEvent*>(event)->device : 0; }

void wait_event(void* event, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(ordering);
  if (event) learn(clock_of(number_of(stream)), static_cast<RecordedEvent*>(event)->clock);
}

void synchronize_event(void* event) {
  std::lock_guard<std::mutex> lock(ordering);
  if (event) learn(host, static_cast<RecordedEvent*>(event)->clock);
}

void synchronize_stream(c10::Stream stream) {
  std::lock_guard<std::mutex> lock(ordering);
  learn(host, clock_of(number_of(stream)));
}

void synchronize_device(int device) {
  std::lock_guard<std::mutex> lock(ordering);
  for (size_t stream = 0; stream < clocks.size(); ++stream)
    if (device_of(static_cast<int>(stream)) == device) learn(host, clocks[stream]);
}

Launch::Launch(int device) : stream_(number_of(current_stream(device))) {
  std::lock_guard<std::mutex> lock(ordering);
  time_ = tick(stream_);
}

void Launch::use(Block* block, bool writes, const char* what) const {
  if (!block) return;
  std::lock_guard<std::mutex> lock(ordering);
  const Use* early = knows(stream_, block->written) ? nullptr : &block->written;
  for (const auto& read : block->read)
    if (writes && !knows(stream_, read)) early = &read;
  if (early && is_strict()) {
    TORCH_CHECK(
        false, what, writes ? " writes" : " reads", " on ", name_of(stream_), " memory that ", name_of(early->stream),
        early == &block->written ? " wrote" : " reads", ", without having waited for it: a GPU may do so too early. Call ",
        "stream.wait_stream(other) before.");
  }
  if (writes) {
    block->written = {stream_, time_};
    block->read.clear();
  } else {
    note(block->read, {stream_, time_});
  }
}

void born(Block& block) {
  std::lock_guard<std::mutex> lock(ordering);
  block.home = number_of(current_stream(block.device));
  block.written = {block.home, tick(block.home)};
  if (returned.size() <= static_cast<size_t>(block.home)) return;
  auto& uses = returned[block.home];
  uses.erase(std::remove_if(uses.begin(), uses.end(), [&](const Use& use) { return knows(block.home, use); }), uses.end());
  if (uses.empty() || !is_strict()) return;
  const int other = uses.front().stream;
  uses.clear();
  TORCH_CHECK(
      false, name_of(block.home), " reuses memory that was freed while ", name_of(other), " could still use it, without having waited "
      "for it: a GPU may write to it too early. Keep the tensor until the first stream has waited for the other, or call "
      "tensor.record_stream(stream).");
}

void freed(Block& block) {
  std::lock_guard<std::mutex> lock(ordering);
  if (returned.size() <= static_cast<size_t>(block.home)) returned.resize(block.home + 1);
  block.read.push_back(block.written);
  for (const auto& use : block.read)
    if (!knows(block.home, use) && std::find(block.recorded.begin(), block.recorded.end(), use.stream) == block.recorded.end())
      note(returned[block.home], use);
}

void used_on(Block& block, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(ordering);
  block.recorded.push_back(number_of(stream));
}

void wait_for_each_other(int device, int other) {
  std::lock_guard<std::mutex> lock(ordering);
  const int one = number_of(current_stream(device)), two = number_of(current_stream(other));
  tick(one);
  tick(two);
  learn(clock_of(one), Clock(clock_of(two)));
  learn(clock_of(two), Clock(clock_of(one)));
}

void reset_streams() {
  std::lock_guard<std::mutex> lock(ordering);
  clocks.clear();
  host.clear();
  returned.clear();
}

}  // namespace simulation
