package blobcache

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/storage/blob"
)

// An access profile says what the first readers of a layer read, in that order. It lies in the store with the layer, and is used to
// fetch that before it is asked for. It is a hint: wrong ones cost transfers, nothing else.
type profile struct {
	Schema int     `json:"schema"`
	Reads  []touch `json:"reads"`
}

type touch struct {
	Blob string `json:"blob"` // SHA-256 in hexadecimal
	Off  int64  `json:"off"`
	Len  int64  `json:"len"`
}

const (
	profileSchema = 1
	maxProfile    = 1 << 20 // bytes
	maxTouches    = 8192
	// maxRecorded bounds the bytes that a profile names.
	maxRecorded = 1 << 30
)

// profileName is the name of a layer's profile in the store; layers are named by 64 hexadecimal digits.
func profileName(layer string) (string, bool) {
	if _, ok := parseSum(layer); !ok {
		return "", false
	}
	return "profiles/" + layer[:2] + "/" + layer, true
}

// parseProfile checks a profile, which comes from a store.
func parseProfile(b []byte) ([]touch, error) {
	if len(b) > maxProfile {
		return nil, errs.OverLimit(errs.Invalid, "bytes of an access profile", maxProfile, len(b))
	}
	var p profile
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, errs.E(errs.Invalid, "an access profile is not understood: %w", err)
	}
	if p.Schema != profileSchema || len(p.Reads) > maxTouches {
		return nil, errs.E(errs.Invalid, "an access profile of schema %d with %d reads", p.Schema, len(p.Reads))
	}
	left := int64(maxRecorded)
	for _, t := range p.Reads {
		if _, ok := parseSum(t.Blob); !ok || t.Off < 0 || t.Len <= 0 || t.Len > left {
			return nil, errs.E(errs.Invalid, "an access profile has a read of %d bytes at %d of %.80q", t.Len, t.Off, t.Blob)
		}
		left -= t.Len
	}
	return p.Reads, nil
}

// recorder notes what is read of a layer.
type recorder struct {
	mu    sync.Mutex
	seen  map[touch]bool
	reads []touch
	bytes int64
}

func (r *recorder) add(d blob.Sum, off, n int64) {
	t := touch{d.String(), off, n}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen[t] || len(r.reads) >= maxTouches || r.bytes+n > maxRecorded {
		return
	}
	r.seen[t] = true
	r.bytes += n
	// A sequential reader makes one long entry.
	if k := len(r.reads) - 1; k >= 0 && r.reads[k].Blob == t.Blob && r.reads[k].Off+r.reads[k].Len == off {
		r.reads[k].Len += n
		return
	}
	r.reads = append(r.reads, t)
}

func (r *recorder) encode() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return json.Marshal(profile{profileSchema, slices.Clone(r.reads)})
}

// Warm fetches in the background what earlier readers of an attached layer read first, or, when nobody has recorded that, records it now. It
// returns at once.
func (c *Cache) Warm(layer string, objects []Object) {
	name, ok := profileName(layer)
	if !ok {
		return
	}
	c.spawn(func() {
		// Recording begins at once: the first reads are the ones that count.
		r := &recorder{seen: map[touch]bool{}}
		c.record(r, objects, true)
		reads, err := c.readProfile(name)
		if err == nil {
			c.record(r, objects, false)
			c.prefetch(reads, objects)
			return
		}
		if !errs.Is(err, errs.NotFound) {
			c.record(r, objects, false)
			c.cfg.Log.Debug("no access profile", "layer", layer, "err", err)
			return
		}
		select {
		case <-time.After(c.cfg.RecordTime):
		case <-c.ctx.Done():
		}
		c.record(r, objects, false)
		if c.ctx.Err() != nil {
			return
		}
		if err := c.writeProfile(name, r); err != nil {
			c.cfg.Log.Warn("an access profile was not stored", "layer", layer, "err", err)
		}
	})
}

// record begins or ends noting the reads of blobs.
func (c *Cache) record(r *recorder, objects []Object, on bool) {
	for _, o := range objects {
		e := c.find(o.Digest)
		if e == nil {
			continue
		}
		e.mu.Lock()
		// A new slice: readers use the old one without the lock.
		records := slices.DeleteFunc(slices.Clone(e.records), func(x *recorder) bool { return x == r })
		if on {
			records = append(records, r)
		}
		e.records = records
		e.mu.Unlock()
	}
}

func (c *Cache) readProfile(name string) ([]touch, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.ReadTime)
	defer cancel()
	b, err := blob.ReadAll(ctx, c.cfg.Store, name, maxProfile)
	if err != nil {
		return nil, err
	}
	return parseProfile(b)
}

func (c *Cache) writeProfile(name string, r *recorder) error {
	b, err := r.encode()
	if err != nil {
		return err
	}
	if len(r.reads) == 0 || len(b) > maxProfile {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.ReadTime)
	defer cancel()
	if err := c.cfg.Store.Put(ctx, name, bytes.NewReader(b)); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// prefetch fetches what a profile names, of the given blobs only.
func (c *Cache) prefetch(reads []touch, objects []Object) {
	for _, t := range reads {
		d, _ := parseSum(t.Blob)
		e := c.find(d)
		if e == nil || t.Off >= e.obj.Size || !slices.ContainsFunc(objects, func(o Object) bool { return o.Digest == d }) {
			continue
		}
		ctx, cancel := context.WithTimeout(c.ctx, c.cfg.ReadTime)
		x, err := e.load(ctx)
		cancel()
		if err != nil || x == nil {
			continue
		}
		e.fetchIdle(x, x.At(t.Off), x.At(min(t.Off+t.Len, e.obj.Size)-1))
	}
}
