package files

import "sync"

// buffers lends frame buffers to running operations, so that an idle service
// holds none.
type buffers struct{ pool sync.Pool }

func (b *buffers) get() *[]byte {
	if v, ok := b.pool.Get().(*[]byte); ok {
		return v
	}
	buf := newBuffer()
	return &buf
}

func (b *buffers) put(buf *[]byte) { b.pool.Put(buf) }
