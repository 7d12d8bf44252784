package blobd

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
	"github.com/harena-dev/harena/internal/storage/blobcache"
	"github.com/harena-dev/harena/internal/storage/fuseblob"
)

// state is what a successor must know of what is attached. The file is replaced before a call is answered.
type state struct {
	Boot string `json:"boot"`
	// Connection counts connections to the kernel. Mounts made over an earlier one are broken.
	Connection int                       `json:"connection"`
	Layers     map[string]*attachedLayer `json:"layers"`
	// Detached blobs may still be mounted: an unmounted file system goes on while something in it is open.
	Detached []Object `json:"detached,omitempty"`
}

type attachedLayer struct {
	Blobs []Object `json:"blobs"`
	Lazy  []bool   `json:"lazy"`
	// Connection is the one its lazy blobs were given out on.
	Connection int `json:"connection"`
}

// maxDetached is how many blobs are served after they were detached.
const maxDetached = 4096

// degraded tells whether what was mounted from the layer is broken.
func (l *attachedLayer) degraded(connection int) bool {
	return l.Connection < connection && slices.Contains(l.Lazy, true)
}

// readState reads the file; nothing is known when there is none, it is damaged (by the loss of power: it is not synced), or of another boot.
func readState(path, boot string) *state {
	s := &state{}
	b, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(b, s) != nil || s.Boot != boot {
		s = &state{Boot: boot}
	}
	if s.Layers == nil {
		s.Layers = map[string]*attachedLayer{}
	}
	for name, l := range s.Layers {
		if l == nil || len(l.Lazy) != len(l.Blobs) || checkAttach(name, l.Blobs) != nil {
			delete(s.Layers, name)
		}
	}
	return s
}

func (s *state) write(path string) error {
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return errs.E(errs.Capacity, "blobd cannot write its state: %w", err).WithHint("the disk of the data directory may be full")
	}
	if err := os.Rename(tmp, path); err != nil {
		return errs.E(errs.Internal, "blobd cannot write its state: %w", err)
	}
	return nil
}

func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// toObject is for digests that were checked.
func toObject(o Object) blobcache.Object {
	out := blobcache.Object{Digest: toSum(o.Digest), Size: o.Size}
	if o.Root != "" {
		root := toSum(o.Root)
		out.Root = &root
	}
	return out
}

func toSum(digits string) blob.Sum {
	var s blob.Sum
	b, err := hex.DecodeString(digits)
	if err == nil {
		copy(s[:], b)
	}
	return s
}

// nodeOf is a blob's node ID: the same in every daemon.
func nodeOf(d blob.Sum) uint64 {
	var n uint64
	for _, b := range d[:8] {
		n = n<<8 | uint64(b)
	}
	return max(n&^(1<<63), 3)
}

// files is what the kernel sees: fuseblob.Files.
type files struct {
	cache *blobcache.Cache

	mu     sync.RWMutex
	byNode map[uint64]blobcache.Object
}

func (f *files) add(o blobcache.Object) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := nodeOf(o.Digest)
	if other, ok := f.byNode[n]; ok && other.Digest != o.Digest {
		return errs.E(errs.Internal, "blobs %s and %s have the same node ID", o.Digest, other.Digest)
	}
	f.byNode[n] = o
	return nil
}

func (f *files) remove(d blob.Sum) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.byNode, nodeOf(d))
}

func toFile(o blobcache.Object) fuseblob.File {
	return fuseblob.File{Name: o.Digest.String(), Node: nodeOf(o.Digest), Size: o.Size}
}

// Lookup implements fuseblob.Files.
func (f *files) Lookup(name string) (fuseblob.File, bool) {
	if !hexDigest.MatchString(name) {
		return fuseblob.File{}, false
	}
	file, ok := f.Node(nodeOf(toSum(name)))
	return file, ok && file.Name == name
}

// Node implements fuseblob.Files.
func (f *files) Node(id uint64) (fuseblob.File, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	o, ok := f.byNode[id]
	if !ok {
		return fuseblob.File{}, false
	}
	return toFile(o), true
}

// List implements fuseblob.Files.
func (f *files) List() []fuseblob.File {
	f.mu.RLock()
	defer f.mu.RUnlock()
	out := make([]fuseblob.File, 0, len(f.byNode))
	for _, o := range f.byNode {
		out = append(out, toFile(o))
	}
	slices.SortFunc(out, func(a, b fuseblob.File) int { return strings.Compare(a.Name, b.Name) })
	return out
}

func (f *files) digest(node uint64) (blob.Sum, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	o, ok := f.byNode[node]
	return o.Digest, ok
}

// ReadAt implements fuseblob.Files.
func (f *files) ReadAt(ctx context.Context, node uint64, p []byte, off int64) error {
	d, ok := f.digest(node)
	if !ok {
		return errs.E(errs.NotFound, "node %d is not known", node)
	}
	return f.cache.ReadAt(ctx, d, p, off)
}

// Ready implements fuseblob.Files.
func (f *files) Ready(node uint64, n int, off int64) bool {
	d, ok := f.digest(node)
	return ok && f.cache.Ready(d, n, off)
}
