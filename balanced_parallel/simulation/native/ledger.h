// Every byte of the simulated devices: what is in use, what it is for, and what moves between them.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include <c10/core/Storage.h>

namespace simulation {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 64;      // at most
constexpr int kHost = kDevices;   // the CPU's place in the table of traffic

enum class Category : uint8_t { Parameters, Gradients, OptimizerState, Inputs, Activations, Other };
constexpr int kCategories = 6;

struct Use {  // of memory, by a kernel: on which stream, and when in that stream's own time
  int stream = -1;
  uint64_t time = 0;
};

// One allocation. It outlives its memory while a peak remembers it: what it was for may be known only later (a gradient
// is known when the optimizer is given it).
struct Block {
  const int64_t bytes;
  const int device;
  const uint64_t cluster;              // which cluster it belongs to: the process may have several, one after the other
  std::atomic<Category> category;
  std::atomic<bool> fresh{true};       // nothing was written to it yet
  int home = 0;                        // the stream that it was allocated on, which has its memory next
  Use written;                         // the last one, and what has been read since: one for each stream
  std::vector<Use> read;
  std::vector<int> recorded;           // the streams that the allocator was told of
};

void start(int devices, const int64_t* capacities, bool strict);
void stop();
int device_count();                    // 0 outside a cluster
bool is_strict();
void check_device(int device);
uint64_t current_cluster();

c10::DataPtr allocate(size_t bytes, int device);             // throws c10::OutOfMemoryError over the capacity
c10::DataPtr adopt(c10::DataPtr host, size_t bytes, int device);  // the same, for memory that a CPU kernel has filled
Block* block_of(const c10::DataPtr& pointer);                // null where there is no memory
inline Block* block_of(const c10::Storage& storage) { return block_of(storage.data_ptr()); }
void move_bytes(int source, int target, int64_t bytes);
bool in_backward();                    // running a graph, and not recomputing a forward in it
Category computed();                   // what an operator's result is at this moment

}  // namespace simulation
