package files

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
)

// record gives a box a journal and a log, in dir, as each supervisor of a sandbox has.
func (b *box) record(dir string) {
	b.t.Helper()
	must(b.t, b.svc.cfg.OpLog.Close())
	var err error
	if b.svc.cfg.Journal, err = journal.Open(filepath.Join(dir, "ops"), 0); err != nil {
		b.t.Fatal(err)
	}
	if b.svc.cfg.OpLog, err = oplog.Open(oplog.Config{Dir: filepath.Join(dir, "log")}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) logged() (out []*harenav1.LogEntry) {
	b.t.Helper()
	err := b.svc.cfg.OpLog.Read(b.ctx(), &harenav1.LogRequest{}, func(e *harenav1.LogEntry) error {
		out = append(out, e)
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func (b *box) writeOp(op, path, content string) (*harenav1.FileInfo, error) {
	res, err := b.svc.Write(b.ctx(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, Path: path, Content: []byte(content), OpId: op, RequestId: op + content + path}))
	if err != nil {
		return nil, errs.FromConnect(err)
	}
	return res.Msg.GetInfo(), nil
}

func TestFileOperationsHappenOnce(t *testing.T) {
	b := newBox(t)
	dir := t.TempDir()
	b.record(dir)
	first, err := b.writeOp("w", "/f", "one")
	if err != nil {
		t.Fatal(err)
	}
	// Somebody changes it; a retry must not change it back, whatever process answers.
	if _, err := b.writeOp("", "/f", "two"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		again, err := b.svc.Write(b.ctx(), connect.NewRequest(&harenav1.WriteRequest{SandboxId: boxID, Path: "/f", Content: []byte("one"), OpId: "w", RequestId: "another"}))
		if err != nil || again.Msg.GetInfo().GetModified().AsTime() != first.GetModified().AsTime() {
			t.Errorf("got %v, %v", again, err)
		}
		if got, _ := os.ReadFile(b.host("/f")); string(got) != "two" {
			t.Errorf("it was written again: %q", got)
		}
		b.record(dir)
	}
	_, err = b.writeOp("w", "/f", "other")
	wantKind(t, err, errs.Exists, "another file operation")
	mv := &harenav1.MoveRequest{SandboxId: boxID, From: "/f", To: "/g", OpId: "m"}
	for range 2 {
		if _, err := b.svc.Move(b.ctx(), connect.NewRequest(mv)); err != nil {
			t.Fatal(err)
		}
	}
	rm := &harenav1.RemoveRequest{SandboxId: boxID, Path: "/g", OpId: "r"}
	for range 2 {
		if _, err := b.svc.Remove(b.ctx(), connect.NewRequest(rm)); err != nil {
			t.Fatal(err)
		}
	}
	// What failed is tried again.
	mk := &harenav1.MakeDirRequest{SandboxId: boxID, Path: "/d/e", OpId: "k"}
	if _, err := b.svc.MakeDir(b.ctx(), connect.NewRequest(mk)); err == nil {
		t.Error("no error")
	}
	b.mkdir("/d", 0, 0o755)
	for range 2 {
		if _, err := b.svc.MakeDir(b.ctx(), connect.NewRequest(mk)); err != nil {
			t.Fatal(err)
		}
	}
	var kinds []string
	for _, e := range b.logged() {
		if f := e.GetFile(); f != nil {
			kinds = append(kinds, f.GetOperation())
		}
	}
	if got := strings.Join(kinds, " "); got != "write write move remove mkdir" {
		t.Errorf("logged: %s", got)
	}
}

func TestUploadsHappenOnce(t *testing.T) {
	b := newBox(t)
	b.record(t.TempDir())
	server := httptest.NewServer(b.svc.HTTP())
	defer server.Close()
	put := func(op, content string) (int, string) {
		req, err := http.NewRequestWithContext(b.ctx(), http.MethodPut, server.URL+"/v1/sandboxes/"+boxID+"/files?path=/big&op_id="+op, strings.NewReader(content))
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(body)
	}
	big := strings.Repeat("0123456789abcdef", 64<<10)
	if code, body := put("u", big); code != http.StatusOK {
		t.Fatal(code, body)
	}
	if err := os.WriteFile(b.host("/big"), []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	if code, body := put("u", big); code != http.StatusOK {
		t.Error(code, body)
	}
	if code, body := put("u", big[1:]); code != http.StatusConflict || !strings.Contains(body, "other content") {
		t.Error(code, body)
	}
	if got, _ := os.ReadFile(b.host("/big")); string(got) != "changed" {
		t.Errorf("it was written again: %d bytes", len(got))
	}
	var content []byte
	for _, e := range b.logged() {
		content = append(content, e.GetContent().GetData()...)
	}
	if !bytes.Equal(content, []byte(big)) {
		t.Errorf("the log has %d bytes of %d", len(content), len(big))
	}
}

// A supervisor that died between the two lines of the journal.
func TestFileOperationThatWasCutOff(t *testing.T) {
	b := newBox(t)
	b.record(t.TempDir())
	m := &harenav1.WriteRequest{SandboxId: boxID, Path: "/f", Content: []byte("x"), OpId: "cut"}
	print, err := printOf(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.svc.cfg.Journal.Start(&journal.Entry{OpID: "cut", Request: print, Kind: opKindWrite}); err != nil {
		t.Fatal(err)
	}
	_, err = b.svc.Write(b.ctx(), connect.NewRequest(m))
	wantKind(t, errs.FromConnect(err), errs.Precondition, "indeterminate")
	if _, err := os.Stat(b.host("/f")); err == nil {
		t.Error("it was done")
	}
}
