// Package blobd is the process that serves data blobs of remote layers to the kernel, and its client.
//
// # Processes
//
// `harena blobd` (the daemon) is started by the node and outlives it. It serves one FUSE file system, DIR/blobfs, that has each
// attached blob as a file named by its SHA-256; EROFS images of layers are mounted with such files as devices. What is read
// is fetched from the store, verified and kept in DIR/cache/data.
//
// A small process beside it (the holder, `harena blobd hold`) keeps a descriptor of the connection to the kernel. When the daemon dies, readers
// wait; a successor gets the descriptor from the holder and has the kernel send again what was not answered. The node starts
// the successor, or the holder when the node is gone, too. When no daemon has served for Config.Patience, the holder ends the connection: readers get EIO. A later daemon makes a new one, and
// reports layers that were attached to the old one as degraded: what is mounted from them stays broken, and mounts made
// after a new Attach work. When the holder dies, the daemon starts another.
//
// # Files
//
//	DIR/blobd.sock            control, HTTP with JSON (client.go)
//	DIR/blobd/state.json      what is attached, replaced by rename before it is answered
//	DIR/blobd/holder.sock     where the holder hands the descriptor over
//	DIR/blobd/log             what daemon and holder have to say
//	DIR/blobfs                mount point
//	DIR/cache/data            the local cache (package blobcache)
package blobd

import (
	"path/filepath"
	"regexp"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blobcache"
)

// Object is a data blob: the SHA-256 of its bytes, 64 hexadecimal digits, and their number.
type Object struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
	// Root, if known, is blob.Index.Root in hexadecimal: with it every frame is checked against what the manifest says, not
	// only against the store's own index until the blob is complete.
	Root string `json:"root,omitempty"`
}

// Path is where a blob can be read.
type Path struct {
	Path string `json:"path"`
	// Lazy: it is served by the daemon. Otherwise it is a complete file in the cache, which stays until Detach.
	Lazy bool `json:"lazy"`
}

// Status is what the daemon is doing.
type Status struct {
	Version   string        `json:"version"`
	Pid       int           `json:"pid"`
	HolderPid int           `json:"holder_pid"`
	Since     time.Time     `json:"since"`
	Takeover  bool          `json:"takeover"` // it took a connection over when it started
	Layers    []LayerStatus `json:"layers"`

	Requests int64            `json:"requests"` // of the kernel, answered
	Waiting  int              `json:"waiting"`  // reads that wait for the store
	Cache    blobcache.Stats  `json:"cache"`
	Store    blobcache.Outage `json:"store"`
}

// LayerStatus is one attached layer.
type LayerStatus struct {
	Layer    string `json:"layer"`
	Blobs    int    `json:"blobs"`
	Lazy     int    `json:"lazy"` // blobs that are read through the daemon
	Degraded bool   `json:"degraded,omitempty"`
}

// Event is something that an operator, or the owner of a sandbox, wants to know.
type Event struct {
	Kind    string    `json:"kind"`
	Message string    `json:"message"`
	Layers  []string  `json:"layers,omitempty"` // as named in Attach
	Blob    string    `json:"blob,omitempty"`
	Time    time.Time `json:"time"`
}

// The kinds of events.
const (
	EventTakeover  = "blobd.takeover"  // a new daemon serves a connection on which an earlier one died
	EventDegraded  = "blobd.degraded"  // mounts of the layers give EIO until they are attached and mounted anew
	EventOutage    = "store.outage"    // the store does not answer; reads of the layers wait
	EventFailed    = "store.failed"    // reads of the layers were answered with EIO
	EventRecovered = "store.recovered" // it answers again
	EventCorrupt   = "store.corrupt"   // what the store has is not what its name says
	EventComplete  = "blobd.complete"  // a blob is there whole, and verified: mounts made from now on need no daemon
)

// Defaults of Config.
const (
	DefaultCacheBytes = 32 << 30
	DefaultPatience   = 30 * time.Second
	DefaultReadTime   = 60 * time.Second
)

// Config is what a daemon is started with.
type Config struct {
	Dir   string // the node's data directory
	Store string // URL of the remote store; its credentials are in the environment or in DIR/store.json
	// CacheBytes bounds DIR/cache/data; 0: DefaultCacheBytes.
	CacheBytes int64
	// Patience is how long readers wait for a daemon before they get EIO; 0: DefaultPatience.
	Patience time.Duration
	// ReadTime is how long one read waits for the store before it gets EIO; 0: DefaultReadTime.
	ReadTime time.Duration
}

// WithDefaults returns c with what is 0 replaced.
func (c Config) WithDefaults() Config {
	if c.CacheBytes == 0 {
		c.CacheBytes = DefaultCacheBytes
	}
	if c.Patience == 0 {
		c.Patience = DefaultPatience
	}
	if c.ReadTime == 0 {
		c.ReadTime = DefaultReadTime
	}
	return c
}

func (c Config) socket() string       { return filepath.Join(c.Dir, "blobd.sock") }
func (c Config) own() string          { return filepath.Join(c.Dir, "blobd") }
func (c Config) holderSocket() string { return filepath.Join(c.own(), "holder.sock") }
func (c Config) stateFile() string    { return filepath.Join(c.own(), "state.json") }
func (c Config) logFile() string      { return filepath.Join(c.own(), "log") }
func (c Config) mountPoint() string   { return filepath.Join(c.Dir, "blobfs") }
func (c Config) cache() string        { return filepath.Join(c.Dir, "cache", "data") }

var hexDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

const (
	maxBlobs    = 64      // of one layer
	maxBlobSize = 1 << 46 // 64 TiB
	maxName     = 256     // of a layer
)

func checkAttach(layer string, blobs []Object) error {
	if layer == "" || len(layer) > maxName {
		return errs.E(errs.Invalid, "a layer's name has 1 to %d bytes, not %d", maxName, len(layer))
	}
	if len(blobs) > maxBlobs {
		return errs.OverLimit(errs.Invalid, "blobs of a layer", maxBlobs, len(blobs))
	}
	for _, b := range blobs {
		if !hexDigest.MatchString(b.Digest) {
			return errs.E(errs.Invalid, "%.80q is not a digest", b.Digest).WithHint("64 hexadecimal digits in lower case, without prefix")
		}
		if b.Size < 0 || b.Size > maxBlobSize {
			return errs.OverLimit(errs.Invalid, "size of a blob", int64(maxBlobSize), b.Size)
		}
		if b.Root != "" && !hexDigest.MatchString(b.Root) {
			return errs.E(errs.Invalid, "%.80q is not the root of an index", b.Root)
		}
	}
	return nil
}
