// Streams. Kernels on one stream run in order. Kernels on two streams are ordered only if one has waited for the other.
//
// Simulated kernels have finished when their call returns, so their results are always right. A vector clock per stream, as in
// torch.cuda._sanitizer, records the order that a GPU would guarantee. A use of memory that a GPU might do too early is an error.
#pragma once
#include <c10/core/Stream.h>

#include "ledger.h"

namespace simulation {

c10::Stream current_stream(int device);  // of the calling thread
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(int device);

void record_event(void** event, c10::Stream stream);
void destroy_event(void* event);
int device_of_event(void* event);
void wait_event(void* event, c10::Stream stream);
void synchronize_event(void* event);
void synchronize_stream(c10::Stream stream);  // orders all later calls after the stream
void synchronize_device(int device);

// A kernel or a copy on the current stream of a device.
class Launch {
 public:
  explicit Launch(int device);
  void reads(Block* block, const char* what) const { use(block, false, what); }
  void writes(Block* block, const char* what) const { use(block, true, what); }

 private:
  int stream_;
  uint64_t time_;
  void use(Block* block, bool writes, const char* what) const;
};

void born(Block& block);   // allocation on the current stream, which may reuse memory that was freed to it
void freed(Block& block);  // returns memory to the stream that it was allocated on
void used_on(Block& block, c10::Stream stream);  // record_stream: the allocator waits for that stream
void wait_for_each_other(int device, int other);  // as torch does before and after a copy between devices

void reset_streams();

}  // namespace simulation
