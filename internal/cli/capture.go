package cli

import (
	"encoding/json"
	"io"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

func unmarshal(b []byte, v any) error { return json.Unmarshal(b, v) }

// defaultCapture is the API's default of max_output.
const defaultCapture = 16 << 20

// captured keeps the first bytes of a stream.
type captured struct {
	b     []byte
	limit int
	cut   bool
}

func newCaptured(limit int64) *captured {
	if limit == 0 {
		limit = defaultCapture
	}
	return &captured{limit: int(limit)}
}

func (c *captured) Write(b []byte) (int, error) {
	n := min(len(b), c.limit-len(c.b))
	c.b = append(c.b, b[:n]...)
	c.cut = c.cut || n < len(b)
	return len(b), nil
}

// text is the stream as a string and, when it is not UTF-8, as it is.
func (c *captured) text() (string, []byte) {
	if utf8.Valid(c.b) {
		return string(c.b), nil
	}
	return strings.ToValidUTF8(string(c.b), "\uFFFD"), c.b
}

// firstWrite notes when the first byte passes through any of its writers.
type firstWrite struct {
	start time.Time
	once  sync.Once
	took  *float64
}

func (f *firstWrite) wrap(w io.Writer) io.Writer { return &noting{w, f} }

// at is for use after the last write.
func (f *firstWrite) at() *float64 { return f.took }

type noting struct {
	io.Writer
	f *firstWrite
}

func (n *noting) Write(b []byte) (int, error) {
	n.f.once.Do(func() {
		ms := millis(time.Since(n.f.start))
		n.f.took = &ms
	})
	return n.Writer.Write(b)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
