#include "streams.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <sstream>
#include <unordered_set>
#include <vector>

#include <pthread.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

namespace simulation {
namespace {

using Shared = std::shared_ptr<Block>;
struct Event {
  Shared block;
  bool freed;
};

// Allocations of one device. The blocks at the peak are found by replaying the log since `base`, on request only.
struct Device {
  int64_t capacity = 0, live = 0, peak = 0;
  std::vector<Shared> base, at_peak;
  std::vector<Event> log;
  size_t peak_position = 0;
  bool peak_in_log = true;

  std::vector<Shared> replay(size_t until) const {
    std::unordered_set<Shared> held(base.begin(), base.end());
    for (size_t i = 0; i < until; ++i) {
      if (log[i].freed) held.erase(log[i].block);
      else held.insert(log[i].block);
    }
    return {held.begin(), held.end()};
  }
  void find_peak() {
    if (peak_in_log) at_peak = replay(peak_position);
  }
  void note(Shared block, bool freed) {
    live += freed ? -block->bytes : block->bytes;
    log.push_back({std::move(block), freed});
    if (live > peak) {
      peak = live;
      peak_position = log.size();
      peak_in_log = true;
    }
    if (log.size() >= (1 << 16)) {
      find_peak();
      base = replay(log.size());
      log.clear();
      peak_in_log = false;
    }
  }
  void reset_peak() {
    base = replay(log.size());
    log.clear();
    at_peak.clear();
    peak = live;
    peak_position = 0;
    peak_in_log = true;
  }
};

// Not destroyed: tensors may be freed after the static variables of this library.
std::mutex& mutex = *new std::mutex;
// A fork copies locks that other threads hold, and nothing releases them in the child.
const int at_fork = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
std::vector<Device>& devices = *new std::vector<Device>;
std::atomic<int64_t> moved[kDevices + 1][kDevices + 1];
std::vector<int>& copies = *new std::vector<int>;  // in order: source * (kDevices + 1) + target
std::atomic<uint64_t> cluster{0};
std::atomic<int> count{0};
std::atomic<bool> strict{true};
int64_t allocations = 0, failing = 0;  // number so far, and that of the allocation that fails
thread_local bool in_optimizer = false;

struct Holder {  // context of the pointer of a storage on a simulated device
  Shared block;
  c10::DataPtr host;
};

void release(void* context) {
  std::unique_ptr<Holder> holder(static_cast<Holder*>(context));
  std::lock_guard<std::mutex> lock(mutex);
  const Shared& block = holder->block;
  if (block->cluster != cluster) return;
  devices[block->device].note(block, true);
  freed(*block);
}

int64_t rounded(size_t bytes) {  // kMinBlockSize of c10/cuda/CUDACachingAllocator: multiples of 512 bytes
  return (static_cast<int64_t>(bytes) + 511) / 512 * 512;
}

std::string printed(int64_t bytes) {  // format_size of c10/cuda/CUDACachingAllocator.cpp
  std::ostringstream os;
  os.precision(2);
  os << std::fixed;
  if (bytes <= 1024) os << bytes << " bytes";
  else if (bytes <= 1048576) os << bytes / 1024.0 << " KiB";
  else if (bytes <= 1073741824) os << bytes / 1048576.0 << " MiB";
  else os << bytes / 1073741824.0 << " GiB";
  return os.str();
}

Shared take(size_t bytes, int device, Category category) {
  check_device(device);
  std::lock_guard<std::mutex> lock(mutex);
  Device& on = devices[device];
  const int64_t size = rounded(bytes);
  if (++allocations == failing || on.live + size > on.capacity) {
    C10_THROW_ERROR(
        OutOfMemoryError,
        c10::str(
            "sim out of memory. Tried to allocate ", printed(size), ". GPU ", device, " has a total capacity of ",
            printed(on.capacity), " of which ", printed(on.capacity - on.live), " is free. Of the allocated memory ",
            printed(on.live), " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."));
  }
  auto block = std::make_shared<Block>(size, device, cluster.load(), category);
  born(*block);
  on.note(block, false);
  return block;
}

c10::DataPtr owned(Shared block, c10::DataPtr host) {
  const auto device = c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(block->device));
  auto* holder = new Holder{std::move(block), std::move(host)};
  return {holder->host.get(), holder, &release, device};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    return simulation::allocate(bytes, guard.getDevice().index());
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override { default_copy_data(target, source, bytes); }
  bool initialized() override { return count > 0; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (Block* block = block_of(pointer)) used_on(*block, stream);
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    devices[device].reset_peak();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = devices[device].live;
      (*bytes)[0].peak = devices[device].peak;
    }
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // without `override`: torch 2.11 may not have it
    check_device(device);
    std::lock_guard<std::mutex> lock(mutex);
    return {devices[device].capacity - devices[device].live, devices[device].capacity};
  }
};
Allocator& allocator = *new Allocator;

}  // namespace

void start(int number, const int64_t* capacities, bool is_strict) {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator);
  std::lock_guard<std::mutex> lock(mutex);
  ++cluster;
  devices.assign(number, Device());
  for (int i = 0; i < number; ++i) devices[i].capacity = capacities[i];
  allocations = failing = 0;
  for (auto& row : moved)
    for (auto& bytes : row) bytes = 0;
  copies.clear();
  strict = is_strict;
  count = number;
  reset_streams();
}

void stop() {
  std::lock_guard<std::mutex> lock(mutex);
  count = 0;
  ++cluster;
  devices.clear();
}

int device_count() { return count; }
bool is_strict() { return strict; }
uint64_t current_cluster() { return cluster; }

void check_device(int device) {
  const int number = count;
  TORCH_CHECK(number > 0, "There are no simulated devices here: they exist only inside `with simulate(...)`.");
  TORCH_CHECK(
      device >= 0 && device < number, "invalid device ordinal: there is no sim:", device, ", the cluster has sim:0 to sim:",
      number - 1, ".");
}

c10::DataPtr allocate(size_t bytes, int device) {
  if (bytes == 0) {
    check_device(device);
    return {nullptr, c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device))};
  }
  const auto now = computed();
  auto block = take(bytes, device, now == Category::Other ? now : Category::Inputs);
  return owned(std::move(block), c10::GetAllocator(c10::kCPU)->allocate(bytes));
}

c10::DataPtr adopt(c10::DataPtr host, size_t bytes, int device) {
  if (bytes == 0) return allocate(0, device);
  auto block = take(bytes, device, computed());
  block->fresh = false;
  return owned(std::move(block), std::move(host));
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release ? static_cast<Holder*>(pointer.get_context())->block.get() : nullptr;
}

void move_bytes(int source, int target, int64_t bytes) {
  if (bytes == 0) return;
  moved[source][target] += bytes;
  std::lock_guard<std::mutex> lock(mutex);
  copies.push_back(source * (kDevices + 1) + target);
}

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1 && !c10::GradMode::is_enabled(); }

Category computed() { return in_optimizer || in_backward() ? Category::Other : Category::Activations; }

}  // namespace simulation

// Functions for Python, called through ctypes.
extern "C" {
int simulation_device_count() { return simulation::count; }
int64_t simulation_live(int device) {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  return simulation::devices.at(device).live;
}
int64_t simulation_peak(int device) {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  return simulation::devices.at(device).peak;
}
int64_t simulation_allocations() {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  return simulation::allocations;
}
void simulation_fail_allocation(int64_t number) {  // counted from now on
  std::lock_guard<std::mutex> lock(simulation::mutex);
  simulation::failing = simulation::allocations + number;
}
void simulation_reset_peak() {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  for (auto& device : simulation::devices) device.reset_peak();
}
void simulation_categories(int device, int64_t* bytes) {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  auto& on = simulation::devices.at(device);
  on.find_peak();
  for (const auto& block : on.at_peak) bytes[static_cast<int>(block->category.load())] += block->bytes;
}
int64_t simulation_copies(int64_t first, int64_t length, int* found) {
  std::lock_guard<std::mutex> lock(simulation::mutex);
  const auto size = static_cast<int64_t>(simulation::copies.size());
  for (int64_t i = first; i < std::min(size, first + length); ++i) found[i - first] = simulation::copies[i];
  return size;
}
int64_t simulation_moved(int source, int target) { return simulation::moved[source][target]; }
void simulation_tag(c10::StorageImpl* storage, int category) {
  const auto& pointer = storage->data_ptr();
  if (pointer.get_deleter() == &simulation::release)
    static_cast<simulation::Holder*>(pointer.get_context())->block->category = static_cast<simulation::Category>(category);
}
void simulation_in_optimizer(bool entered) { simulation::in_optimizer = entered; }
}
