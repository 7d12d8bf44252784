package blobcache

const (
	// maxWindow is how many bytes are fetched ahead of a sequential reader: several times what a link of 100 MB/s and 5 ms
	// has under way.
	maxWindow = 8 << 20
	// maxJob bounds the bytes of one request to the store, so that readers of its end do not wait for long.
	maxJob = 4 << 20
	// minRun is how much a reader has read in order when more is fetched ahead of it. Programs that run from mapped libraries touch most
	// frames of each in some order: a third more for nothing costs a cold start 12 % of what it moves. The kernel itself reads
	// ahead of a reader of a file from the beginning.
	minRun = 4 << 20
)

// stream is a reader that goes through a blob in order. It is pure: it decides what to fetch ahead of it.
type stream struct {
	next  int    // the frame expected
	run   int    // frames read so far
	ahead int    // first frame not fetched ahead
	used  uint64 // when; 0: free
}

// advance notes a read of frames up to last, and returns the frames [from, to) to fetch ahead.
//
// Nothing is before minRun. What is fetched ahead in vain is bounded by a third of what the reader has read; a long run soon has the
// whole window.
func (s *stream) advance(last, frames, frameSize int, now uint64) (from, to int) {
	s.used = now
	if last+1 <= s.next { // within the frame that was read before
		return 0, 0
	}
	s.run += last + 1 - s.next
	s.next = last + 1
	window := min(s.run/3, maxWindow/frameSize)
	if s.run*frameSize < minRun || window < 1 {
		return 0, 0
	}
	from = max(s.ahead, s.next)
	to = min(s.next+window, frames)
	// In portions: requests for single frames would spend their time on latency.
	if from >= to || to < frames && to-from < (window+1)/2 {
		return 0, 0
	}
	s.ahead = to
	return from, to
}

// follows tells whether a read of frame first continues the stream. Several requests of a reader's read-ahead come out of order.
func (s *stream) follows(first, slack int) bool {
	return s.used != 0 && first >= s.next-1-slack && first <= s.next+slack
}

// pick returns the stream that a read of frames first to last continues, or one for a new stream in place of the one unused for longest.
func pick(streams []stream, first, slack int) *stream {
	oldest := &streams[0]
	for i := range streams {
		if streams[i].follows(first, slack) {
			return &streams[i]
		}
		if streams[i].used < oldest.used {
			oldest = &streams[i]
		}
	}
	*oldest = stream{next: first, ahead: first}
	return oldest
}
