"""Edits after which Horovod moves large tensors in host memory by collectives of its own.

Sums travel by rings. Open MPI's own choice sends three times a tensor's bytes from one of three
hosts, where 4/3 from each would do. It can be told to use a ring, but only for every reduction in
the process, which would give wrong results for a script's own operations that do not commute.
Horovod's commute.

Between hosts, whatever is gathered or exchanged travels in segments, too. Open MPI sends a large
message as one. The answer that lets the other rank begin has to wait behind it, so a link that
could carry both directions at once often carries one after the other.

``HVKIT_OWN_COLLECTIVES=1`` on all ranks turns this on, and ``hvkit.init`` sets it.
"""

from hvkit.build.edits.source_edits import Edit

_FILE = "horovod/common/ops/mpi_operations.cc"
_WHY = "Open MPI sends more bytes than needed, or leaves links idle"
_UPSTREAM = "leaves the algorithm to MPI"

COLLECTIVES = (
    Edit(
        "collectives",
        _FILE,
        "sums by rings; gathers and exchanges in segments",
        _WHY,
        _UPSTREAM,
        """\
namespace horovod {
namespace common {

MPIAllreduce::MPIAllreduce(""",
        """\
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace horovod {
namespace common {

namespace {

const int SEGMENT_TAG = 7;
// Bytes of a message; sums are added as soon as they have come, while they are in a cache.
const int SEGMENT = 1 << 17;
// Messages that are on their way at a time.
const int AHEAD = 8;
// Bytes of a whole message, and of each rank's block, from which a ring pays.
const int64_t LEAST = 1 << 18;
const int64_t LEAST_BLOCK = 1 << 15;

// Who adds up: MPI, one ring of all ranks, or rings within the hosts and others between them.
enum SumBy : int { BY_MPI = 1, BY_ONE_RING, BY_RINGS_OF_HOSTS };
// Added to it where gathers and exchanges travel in segments.
const int IN_SEGMENTS = 8;

// What the ranks of a process set use; found out together once, and kept with its communicator.
int OwnCollectives(const MPIContext& context) {
  static const int key = [] {
    int made;
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &made, nullptr);
    return made;
  }();
  const MPI_Comm comm = context.GetMPICommunicator(Communicator::GLOBAL);
  void* kept;
  int found;
  MPI_Comm_get_attr(comm, key, &kept, &found);
  if (found) {
    return int(reinterpret_cast<intptr_t>(kept));
  }
  int local_rank, local_size, hosts;
  MPI_Comm_rank(context.GetMPICommunicator(Communicator::LOCAL), &local_rank);
  MPI_Comm_size(context.GetMPICommunicator(Communicator::LOCAL), &local_size);
  const char* value = std::getenv("HVKIT_OWN_COLLECTIVES");
  // Whether all ranks want this, the fewest ranks on a host, and the most.
  int least[] = {value != nullptr && std::string(value) == "1", local_size, -local_size};
  MPI_Allreduce(MPI_IN_PLACE, least, 3, MPI_INT, MPI_MIN, comm);
  hosts = local_rank == 0;
  MPI_Allreduce(MPI_IN_PLACE, &hosts, 1, MPI_INT, MPI_SUM, comm);
  const bool even = least[1] == -least[2];
  // Between two uneven hosts Open MPI sends the fewest bytes: each host has one rank that sends.
  int own = !least[0] || (!even && hosts == 2) ? BY_MPI : even ? BY_RINGS_OF_HOSTS : BY_ONE_RING;
  own += least[0] && hosts > 1 ? IN_SEGMENTS : 0;
  MPI_Comm_set_attr(comm, key, reinterpret_cast<void*>(intptr_t(own)));
  return own;
}

SumBy HowToSum(const MPIContext& context) {
  return SumBy(OwnCollectives(context) & ~IN_SEGMENTS);
}

bool InSegments(const MPIContext& context) {
  return OwnCollectives(context) & IN_SEGMENTS;
}

// Where each of some blocks, of about the same length, begins in a buffer; and the end of the last.
std::vector<int64_t> EvenBlocks(int count, int blocks) {
  std::vector<int64_t> begins;
  for (int block = 0; block <= blocks; ++block) {
    begins.push_back(int64_t(count) * block / blocks);
  }
  return begins;
}

// In size - 1 steps blocks go round, from rank to rank. A rank sends the block ``first`` places
// after its own, then those that it receives.
//
// If it ``adds``, blocks are sums, to which each rank adds its own numbers. These are in ``own``:
// a buffer that stays as it is, or ``buffer``.
//
// Segments of a block are messages of their own. The next are on their way already while a rank
// waits for one, so that a slow link is never idle.
int GoRound(bool adds, int first, const char* own, char* buffer, const std::vector<int64_t>& begins,
            MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  int rank, size, width;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Type_size(type, &width);
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  int64_t longest = 0;
  for (int block = 0; block < size; ++block) {
    longest = std::max(longest, begins[block + 1] - begins[block]);
  }
  const int segment = SEGMENT / width, segments = int(longest / segment) + 1;
  // What a rank sends in one step it has received in the one before.
  const int ahead = std::min(AHEAD, segments), messages = (size - 1) * segments;
  static thread_local char received[AHEAD][SEGMENT];
  MPI_Request requests[AHEAD][2];
  auto place = [&](int block, int offset) { return (begins[block] + offset) * width; };
  auto length = [&](int block, int offset) {
    return int(std::max<int64_t>(
        0, std::min<int64_t>(segment, begins[block + 1] - begins[block] - offset)));
  };
  auto sent_in = [&](int message) { return (rank + size + first - message / segments) % size; };
  auto got_in = [&](int message) { return (sent_in(message) + size - 1) % size; };
  const bool in_place = own == buffer;
  int code = MPI_SUCCESS;
  for (int message = 0; message < messages + ahead && code == MPI_SUCCESS; ++message) {
    const int done = message - ahead;
    if (done >= 0) {
      const int offset = done % segments * segment, got = got_in(done);
      code = MPI_Waitall(2, requests[done % ahead], MPI_STATUSES_IGNORE);
      if (code == MPI_SUCCESS && adds) {
        const void* added = in_place ? received[done % ahead] : own + place(got, offset);
        code = MPI_Reduce_local(added, buffer + place(got, offset), length(got, offset), type, op);
      }
    }
    if (message < messages && code == MPI_SUCCESS) {
      const int offset = message % segments * segment;
      const int sent = sent_in(message), got = got_in(message);
      char* into = adds && in_place ? received[message % ahead] : buffer + place(got, offset);
      const char* from = (adds && message < segments ? own : buffer) + place(sent, offset);
      MPI_Request* pair = requests[message % ahead];
      pair[0] = pair[1] = MPI_REQUEST_NULL;
      if (length(got, offset)) {
        code = MPI_Irecv(into, length(got, offset), type, previous, SEGMENT_TAG, comm, &pair[0]);
      }
      if (code == MPI_SUCCESS && length(sent, offset)) {
        code = MPI_Isend(from, length(sent, offset), type, next, SEGMENT_TAG, comm, &pair[1]);
      }
    }
  }
  return code;
}

// As MPI_Allreduce, for operations that commute. A ring sends 2 (N - 1) / N of the bytes from each
// of N ranks (Patarasuk and Yuan, 2009). Where hosts have several ranks, these add up first, and
// each sends its own block to the other hosts.
int Allreduce(const void* sendbuf, void* recvbuf, int count, MPI_Datatype type, MPI_Op op,
              const MPIContext& context) {
  const MPI_Comm global = context.GetMPICommunicator(Communicator::GLOBAL);
  int size, width;
  MPI_Comm_size(global, &size);
  MPI_Type_size(type, &width);
  const bool large =
      size > 1 && int64_t(count) * width >= std::max(LEAST, size * LEAST_BLOCK);
  const SumBy by = large ? HowToSum(context) : BY_MPI;
  if (by == BY_MPI) {
    return MPI_Allreduce(sendbuf, recvbuf, count, type, op, global);
  }
  const bool one = by == BY_ONE_RING;
  const MPI_Comm local = one ? MPI_COMM_SELF : context.GetMPICommunicator(Communicator::LOCAL);
  const MPI_Comm cross = one ? global : context.GetMPICommunicator(Communicator::CROSS);
  char* buffer = static_cast<char*>(recvbuf);
  const char* own = sendbuf == MPI_IN_PLACE ? buffer : static_cast<const char*>(sendbuf);
  int local_rank, local_size, cross_size;
  MPI_Comm_rank(local, &local_rank);
  MPI_Comm_size(local, &local_size);
  MPI_Comm_size(cross, &cross_size);
  const auto blocks = EvenBlocks(count, local_size);
  const int mine = (local_rank + 1) % local_size;
  char* block = buffer + blocks[mine] * width;
  const char* added = local_size > 1 ? block : own;
  const auto parts = EvenBlocks(int(blocks[mine + 1] - blocks[mine]), cross_size);
  int code = GoRound(true, 0, own, buffer, blocks, type, op, local);
  code = code == MPI_SUCCESS ? GoRound(true, 0, added, block, parts, type, op, cross) : code;
  code = code == MPI_SUCCESS ? GoRound(false, 1, block, block, parts, type, op, cross) : code;
  return code == MPI_SUCCESS ? GoRound(false, 1, buffer, buffer, blocks, type, op, local) : code;
}

// As MPI_Allgatherv, where each rank's elements follow those of the rank before.
int Allgather(const void* sendbuf, void* recvbuf, const int* counts, const int* begins,
              MPI_Datatype type, const MPIContext& context) {
  const MPI_Comm comm = context.GetMPICommunicator(Communicator::GLOBAL);
  int rank, size, width;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Type_size(type, &width);
  std::vector<int64_t> blocks(begins, begins + size);
  blocks.push_back(blocks.back() + counts[size - 1]);
  if (blocks.back() * width < LEAST || !InSegments(context)) {
    return MPI_Allgatherv(sendbuf, counts[rank], type, recvbuf, counts, begins, type, comm);
  }
  char* buffer = static_cast<char*>(recvbuf);
  if (sendbuf != MPI_IN_PLACE && counts[rank] > 0) {
    std::memcpy(buffer + blocks[rank] * width, sendbuf, size_t(counts[rank]) * width);
  }
  return GoRound(false, 0, buffer, buffer, blocks, type, MPI_OP_NULL, comm);
}

// As MPI_Alltoallv. No rank knows how much the others exchange, so all use this whatever that is.
int Alltoall(const void* sendbuf, const std::vector<int32_t>& sendcounts,
             const std::vector<int32_t>& sent_from, void* recvbuf,
             const std::vector<int32_t>& recvcounts, const std::vector<int32_t>& received_at,
             MPI_Datatype type, const MPIContext& context) {
  const MPI_Comm comm = context.GetMPICommunicator(Communicator::GLOBAL);
  if (!InSegments(context)) {
    return MPI_Alltoallv(sendbuf, sendcounts.data(), sent_from.data(), type, recvbuf,
                         recvcounts.data(), received_at.data(), type, comm);
  }
  int rank, size, width;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  MPI_Type_size(type, &width);
  const char* from = static_cast<const char*>(sendbuf);
  char* into = static_cast<char*>(recvbuf);
  if (sendcounts[rank] > 0) {
    std::memcpy(into + int64_t(received_at[rank]) * width,
                from + int64_t(sent_from[rank]) * width, size_t(sendcounts[rank]) * width);
  }
  // A message to one rank and one from another, in the same order on all ranks.
  MPI_Request requests[AHEAD][2];
  std::fill(&requests[0][0], &requests[0][0] + 2 * AHEAD, MPI_REQUEST_NULL);
  const int segment = SEGMENT / width;
  int messages = 0, code = MPI_SUCCESS;
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size, source = (rank + size - step) % size;
    const int most = std::max(sendcounts[to], recvcounts[source]);
    for (int64_t at = 0; at < most && code == MPI_SUCCESS; at += segment, ++messages) {
      const int offset = int(at);
      MPI_Request* pair = requests[messages % AHEAD];
      code = MPI_Waitall(2, pair, MPI_STATUSES_IGNORE);
      if (code == MPI_SUCCESS && offset < recvcounts[source]) {
        code = MPI_Irecv(into + (int64_t(received_at[source]) + offset) * width,
                         std::min(segment, recvcounts[source] - offset), type, source, SEGMENT_TAG,
                         comm, &pair[0]);
      }
      if (code == MPI_SUCCESS && offset < sendcounts[to]) {
        code = MPI_Isend(from + (int64_t(sent_from[to]) + offset) * width,
                         std::min(segment, sendcounts[to] - offset), type, to, SEGMENT_TAG, comm,
                         &pair[1]);
      }
    }
  }
  return code == MPI_SUCCESS ? MPI_Waitall(2 * AHEAD, &requests[0][0], MPI_STATUSES_IGNORE) : code;
}

} // namespace

MPIAllreduce::MPIAllreduce(""",
    ),
    Edit(
        "rings used",
        _FILE,
        "rings for sums of large tensors",
        _WHY,
        _UPSTREAM,
        """\
  int op =
      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,
                    mpi_context.GetMPIDataType(first_entry.tensor),
                    mpiOp,
                    mpi_context.GetMPICommunicator(Communicator::GLOBAL));
""",
        """\
  int op = Allreduce(sendbuf, buffer_data, (int)num_elements,
                     mpi_context.GetMPIDataType(first_entry.tensor), mpiOp, mpi_context);
""",
    ),
    Edit(
        "gathers in segments",
        _FILE,
        "segments for large gathers between hosts",
        _WHY,
        _UPSTREAM,
        """\
  int op = MPI_Allgatherv(sendbuf != nullptr ? sendbuf : MPI_IN_PLACE,
                          (int) total_num_elements,
                          dtype,
                          buffer_data,
                          recvcounts,
                          displcmnts,
                          dtype,
                          mpi_context.GetMPICommunicator(Communicator::GLOBAL));
""",
        """\
  int op = Allgather(sendbuf != nullptr ? sendbuf : MPI_IN_PLACE, buffer_data, recvcounts,
                     displcmnts, dtype, mpi_context);
""",
    ),
    Edit(
        "exchanges in segments",
        _FILE,
        "segments for exchanges between hosts",
        _WHY,
        _UPSTREAM,
        """\
  int op = MPI_Alltoallv(sendbuf, sendcounts.data(), sdispls.data(),
                         mpi_context.GetMPIDataType(e.tensor->dtype()),
                         buffer_data, recvcounts.data(), rdispls.data(),
                         mpi_context.GetMPIDataType(e.output->dtype()),
                         mpi_context.GetMPICommunicator(Communicator::GLOBAL));
""",
        """\
  int op = Alltoall(sendbuf, sendcounts, sdispls, buffer_data, recvcounts, rdispls,
                    mpi_context.GetMPIDataType(e.tensor->dtype()), mpi_context);
""",
    ),
)
