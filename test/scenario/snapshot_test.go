package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
)

// shot is what a snapshot of one sandbox came to.
type shot struct {
	last                             *harenav1.SnapshotResponse
	added, changed, deleted, cleaned []string
	findings                         []string
}

// snapshot takes snapshots and collects what is said of each sandbox.
func snapshot(ctx context.Context, req *harenav1.SnapshotRequest) (map[string]*shot, error) {
	stream, err := the.sandboxes.Snapshot(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	all := map[string]*shot{}
	for stream.Receive() {
		m := stream.Msg()
		s := all[m.GetSandboxId()]
		if s == nil {
			s = &shot{}
			all[m.GetSandboxId()] = s
		}
		s.last = m
		s.added, s.changed = append(s.added, m.GetAdded()...), append(s.changed, m.GetChanged()...)
		s.deleted, s.cleaned = append(s.deleted, m.GetDeleted()...), append(s.cleaned, m.GetCleaned()...)
		s.findings = append(s.findings, m.GetFindings()...)
	}
	return all, stream.Err()
}

// snapshot takes one that has to succeed. Its name goes away with the test.
func (b *box) snapshot(req *harenav1.SnapshotRequest) *shot {
	b.t.Helper()
	req.Selector = &harenav1.Selector{Ids: []string{b.id}}
	all, err := snapshot(within(b.t, 2*time.Minute), req)
	if err != nil {
		b.t.Fatal(explain(err))
	}
	s := all[b.id]
	if s == nil || s.last.GetPhase() != "done" {
		b.t.Fatalf("snapshot: %v", s)
	}
	b.t.Cleanup(func() { removeName(req.GetName()) })
	return s
}

func removeName(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, _ = the.layers.Remove(ctx, connect.NewRequest(&harenav1.RemoveLayerRequest{Name: name})) // gone already
}

func from(image string) func(*harenav1.SandboxSpec) {
	return func(s *harenav1.SandboxSpec) { s.Image = image }
}

// Whatever a writable layer can hold is in the sandbox that is made from its snapshot, and in one made from a snapshot of that.
func TestSnapshotRestoresEverything(t *testing.T) {
	b := create(t)
	b.must(`set -e
mkdir -p /w/d/e && cd /w
echo text > file && ln file hard && ln -s ../nowhere link && mkfifo fifo
printf 'x' > "$(printf 'new\nline')"; printf 'y' > "$(printf 'not\377utf8')"
chmod 4750 file && chown 1000:1001 d && touch -d '2001-02-03 04:05:06.789' d/e
dd if=/dev/zero of=sparse bs=1 count=1 seek=100M 2>/dev/null
rm -rf /usr/share/doc/bash /etc/skel/.bashrc
rm -rf /etc/apt && mkdir /etc/apt && echo other > /etc/apt/new
mv /etc/cron.daily /etc/cron.moved
echo 'export A=1' >> /etc/profile
perl -e 'use Socket; socket(my $s, AF_UNIX, SOCK_STREAM, 0); bind($s, sockaddr_un("/w/socket"))'`)
	// Sizes and link counts of directories are the file system's own.
	list := `own='^/etc/\(hosts\|hostname\|resolv.conf\|machine-id\) '; {
find /w /etc /usr/share/doc ! -type d -printf '%p %y %m %U %G %s %n %l %TY%Tm%Td%TH%TM%TS\n' | grep -v "$own"
find /w /etc /usr/share/doc -type d ! -path /etc -printf '%p %y %m %U %G %TY%Tm%Td%TH%TM%TS\n'
find /w /etc -type f ! -name hosts ! -name hostname ! -name resolv.conf ! -name machine-id -exec sha256sum {} +; } | sort`
	want := b.sh(list).stdout
	s := b.snapshot(&harenav1.SnapshotRequest{Name: "scn-everything:1"})
	for _, p := range []string{"/w/file", "/w/hard", `/w/new\x0aline`, `/w/not\xffutf8`, "/w/socket", "/etc/apt/new", "/etc/cron.moved"} {
		if !slices.Contains(s.added, p) {
			t.Errorf("%s is not told as added", p)
		}
	}
	for _, p := range []string{"/usr/share/doc/bash", "/etc/skel/.bashrc", "/etc/apt/sources.list.d", "/etc/cron.daily"} {
		if !slices.Contains(s.deleted, p) {
			t.Errorf("%s is not told as deleted", p)
		}
	}
	if !slices.Contains(s.changed, "/etc/profile") || slices.Contains(s.changed, "/etc/hosts") {
		t.Errorf("changed: %q", s.changed)
	}
	c := create(t, from("scn-everything:1"))
	same(t, "the restored files", c.sh(list).stdout, want)
	if got := c.get().GetOrigin(); got != "scn-everything:1" {
		t.Errorf("origin %q", got)
	}
	if n := s.last.GetStoredBytes(); n > 10<<20 || s.last.GetLogicalBytes() < 100<<20 {
		t.Errorf("%d bytes stored of %d: holes were stored", n, s.last.GetLogicalBytes())
	}
	c.must("echo more > /w/more")
	c.snapshot(&harenav1.SnapshotRequest{Name: "scn-everything:2"})
	d := create(t, from("scn-everything:2"))
	if got := d.must("cat /w/more /w/file"); got != "more\ntext" {
		t.Errorf("%q", got)
	}
}

// A second snapshot stores what was changed since, and a program that was built works after a restore.
func TestSnapshotIsIncremental(t *testing.T) {
	b := create(t)
	b.must("mkdir /srv/p && cd /srv/p && head -c 20000000 /dev/urandom > blob && printf 'import hashlib;print(hashlib.sha256(open(\"/srv/p/blob\",\"rb\").read()).hexdigest())\n' > run.py")
	want := b.must("sha256sum /srv/p/blob | cut -d' ' -f1")
	first := b.snapshot(&harenav1.SnapshotRequest{Name: "scn-incremental:1"})
	b.must("echo '# a line' >> /srv/p/run.py")
	second := b.snapshot(&harenav1.SnapshotRequest{Name: "scn-incremental:2"})
	if n := first.last.GetStoredBytes(); n < 20_000_000 || n > 21_000_000 {
		t.Errorf("the first stored %d bytes", n)
	}
	if n := second.last.GetStoredBytes(); n > 64<<10 {
		t.Errorf("the second stored %d bytes after a line", n)
	}
	removeName("scn-incremental:1") // what it stored stays
	if _, err := the.layers.CollectGarbage(within(t, time.Minute), connect.NewRequest(&harenav1.CollectGarbageRequest{})); err != nil {
		t.Fatal(explain(err))
	}
	c := create(t, from("scn-incremental:2"))
	if got := c.must("sha256sum /srv/p/blob | cut -d' ' -f1; tail -1 /srv/p/run.py"); got != want+"\n# a line" {
		t.Errorf("%q", got)
	}
}

// usual are places where builders leave what nobody else should see.
var usual = []string{
	"/tmp/notes", "/var/tmp/answer.txt", "/run/x.pid", "/root/.bash_history", "/root/.zsh_history", "/root/.python_history", "/root/.psql_history",
	"/root/.mysql_history", "/root/.node_repl_history", "/root/.lesshst", "/root/.viminfo", "/root/.ssh/id_ed25519", "/root/.ssh/known_hosts",
	"/root/.aws/credentials", "/root/.config/gcloud/access_tokens.db", "/root/.config/gh/hosts.yml", "/root/.kube/config", "/root/.docker/config.json",
	"/root/.netrc", "/root/.git-credentials", "/root/.npmrc", "/root/.pypirc", "/root/.cargo/credentials.toml", "/root/.m2/settings.xml", "/root/.pgpass",
	"/root/.cache/pip/x", "/root/.gnupg/private", "/var/log/build.log", "/var/cache/apt/archives/x.deb", "/var/lib/apt/lists/x", "/home/u/.bash_history",
	"/home/u/.ssh/id_rsa", "/srv/app/.git-credentials", "/srv/app/.main.c.swp", "/srv/app/core.1234", "/etc/ssh/ssh_host_rsa_key", "/var/mail/root",
	"/root/.local/share/Trash/files/x", "/root/.huggingface/token", "/var/lib/systemd/random-seed",
}

// What is planted in the usual places is in no byte of the packed layer: neither content nor, of new directories, names.
func TestResidueIsNotPacked(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	const mark = "PLANTED-RESIDUE-"
	for i, p := range usual {
		b.must(fmt.Sprintf("mkdir -p %s && printf '%s%d-%s' > %s", filepath.Dir(p), mark, i, strings.Repeat("z", 5000), p))
	}
	b.must("mkdir /srv/mine && echo mine > /srv/mine/x && echo fine > /srv/app/kept && ln /tmp/notes /tmp/hard && echo " + mark + "kept > /tmp/wanted")
	s := b.snapshot(&harenav1.SnapshotRequest{Name: "scn-residue:1", Rules: "# mine\n/srv/mine/**\n"})
	for _, p := range usual {
		if !slices.Contains(s.cleaned, p) {
			t.Errorf("%s was not cleaned", p)
		}
	}
	if slices.Contains(s.cleaned, "/srv/app/kept") || !slices.Contains(s.cleaned, "/srv/mine/x") {
		t.Error("too much was cleaned, or too little")
	}
	for _, o := range objectsOf(t, own.dir, s.last.GetLayer().GetDigest()) {
		if bytes.Contains(o, []byte(mark)) {
			t.Error("the packed layer has what was planted")
		}
		if bytes.Contains(o, []byte("id_ed25519")) || bytes.Contains(o, []byte("answer.txt")) {
			t.Error("the packed layer has the name of what was planted")
		}
	}
	s = b.snapshot(&harenav1.SnapshotRequest{Name: "scn-residue:2", Keep: []string{"/tmp/wanted"}})
	if slices.Contains(s.cleaned, "/tmp/wanted") || !slices.Contains(s.added, "/tmp/wanted") {
		t.Error("what was to be kept was cleaned")
	}
	s = b.snapshot(&harenav1.SnapshotRequest{Name: "scn-residue:3", NoClean: true})
	if len(s.cleaned) > 0 {
		t.Errorf("cleaned: %q", s.cleaned)
	}
}

// Nor is it in anything that a chain of snapshots has, under whatever name, attribute or link it was left: in nothing that the node keeps of
// layers are the planted bytes.
func TestResidueOfAChain(t *testing.T) {
	own := needOwn(t)
	const mark = "PLANTED-IN-A-CHAIN-"
	plant := func(b *box, n int) {
		t.Helper()
		var all strings.Builder
		for _, p := range usual {
			fmt.Fprintf(&all, "%s\n", p)
		}
		b.must(fmt.Sprintf(`set -e; cat > /tmp/places <<'EOF'
%sEOF
cat > /tmp/plant.py <<'EOF'
import os, socket
mark, n = %q, %d
held = []
for i, p in enumerate(open("/tmp/places").read().split()):
    d = os.path.dirname(p)
    os.makedirs(d, exist_ok=True)
    with open(p, "w") as f:  # odd sizes: the ends of blocks have nothing of it either
        f.write((mark + "content-%%d-%%d\n" %% (n, i)) * (37 * (i + 1)))
    os.setxattr(p, "user.note", (mark + "attribute").encode())
    if d.startswith(("/tmp", "/root/.ssh", "/var/log")):
        x = d + "/" + mark + "%%d-%%d-" %% (n, i)
        os.makedirs(x + "directory/sub")
        os.setxattr(x + "directory", "user.note", (mark + "attribute").encode())
        os.symlink("/" + mark + "target", d + "/link%%d-%%d" %% (n, i))
        os.mkfifo(x + "fifo")
        socket.socket(socket.AF_UNIX).bind(x + "socket")
        os.link(p, "/var/tmp/%%slink%%d-%%d" %% (mark, n, i))
    with open("/srv/kept%%d-%%d" %% (n, i), "w") as f:
        f.write("k" * (i * 371 + 1))
with open("/srv/gone", "w") as f:
    f.write(mark * 5000)
os.unlink("/srv/gone")
EOF
python3 /tmp/plant.py; (exec 9> /srv/open; rm /srv/open; for i in 1 2 3 4 5 6 7 8 9; do echo %[2]s open; done >&9; sleep 1000) > /dev/null 2>&1 &
`, all.String(), mark, n))
	}
	b := create(t)
	length := count(3, 7) // with 5 they are merged
	for i := range length {
		plant(b, i)
		name := fmt.Sprintf("scn-residue-chain:%d", i)
		s := b.snapshot(&harenav1.SnapshotRequest{Name: name})
		for _, p := range usual {
			if !slices.Contains(s.cleaned, p) {
				t.Errorf("%s was not cleaned", p)
			}
		}
		if i%2 == 1 { // also upon one and the same sandbox
			b.must("rm -rf /tmp/* /root/.ssh /var/log/* /srv/kept0-*")
			continue
		}
		b = create(t, from(name))
	}
	if got := b.must("ls /srv | grep -c kept"); got == "0" {
		t.Error("too much was cleaned")
	}
	searched := 0
	err := filepath.WalkDir(filepath.Join(own.dir, "layers"), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		searched++
		o, err := os.ReadFile(path)
		if i := bytes.Index(o, []byte(mark)); i >= 0 {
			t.Errorf("%s has what was planted: %q", path, o[i:min(len(o), i+len(mark)+20)])
		}
		return err
	})
	if err != nil || searched < 3*length {
		t.Errorf("%d files were searched: %v", searched, err)
	}
}

// A chain of any length has a bounded number of layers, and everything that was ever written to it.
func TestChainOfSnapshots(t *testing.T) {
	length := count(7, 50)
	image := the.image
	for i := range length {
		b := create(t, from(image))
		b.must(fmt.Sprintf("echo %d > /srv/step%d; echo %d >> /srv/all; rm -f /srv/step%d", i, i, i, i-2))
		image = fmt.Sprintf("scn-chain:%d", i)
		b.snapshot(&harenav1.SnapshotRequest{Name: image})
		if err := stop(within(t, time.Minute), b.id); err != nil {
			t.Fatal(explain(err))
		}
		l, err := the.layers.Get(within(t, time.Minute), connect.NewRequest(&harenav1.GetLayerRequest{Name: image}))
		if err != nil {
			t.Fatal(explain(err))
		}
		if n := len(l.Msg.GetLayer().GetParents()); n > 4 { // the base, and three snapshots
			t.Errorf("snapshot %d lies on %d layers", i, n)
		}
	}
	b := create(t, from(image))
	if got, want := b.must("wc -l < /srv/all; ls /srv"), fmt.Sprintf("%d\nall\nstep%d\nstep%d", length, length-2, length-1); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// objectsOf reads the objects that a layer's manifest names as its own.
func objectsOf(t *testing.T, dir, digest string) [][]byte {
	t.Helper()
	path := func(kind, d, ext string) string {
		h := strings.TrimPrefix(d, "sha256:")
		return filepath.Join(dir, "layers", kind, h[:2], h+ext)
	}
	b, err := os.ReadFile(path("manifests", digest, ".json"))
	if err != nil {
		t.Fatal(err)
	}
	var m struct{ Meta, Blob struct{ Digest string } }
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	out := [][]byte{b}
	for _, d := range []string{m.Meta.Digest, m.Blob.Digest} {
		o, err := os.ReadFile(path("objects", d, ""))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, o)
	}
	return out
}

func TestSnapshotFindings(t *testing.T) {
	b := create(t)
	b.must(`cd /srv && echo AKIAABCDEFGHIJKLMNOP > key && echo x > open && chmod 666 open && cp /bin/true su && chmod 4755 su && echo x > future && touch -d '+2 years' future && echo x > nobody && chown 65534:65534 nobody`)
	s := b.snapshot(&harenav1.SnapshotRequest{Name: "scn-findings:1"})
	for _, want := range []string{"secret: /srv/key: ", "world-writable: /srv/open: ", "setuid: /srv/su: ", "future: /srv/future: ", "owner: /srv/nobody: "} {
		if !slices.ContainsFunc(s.findings, func(f string) bool { return strings.HasPrefix(f, want) }) {
			t.Errorf("no finding %q in %q", want, s.findings)
		}
	}
	all, err := snapshot(within(t, time.Minute), &harenav1.SnapshotRequest{Name: "scn-findings:2", Strict: true, Selector: &harenav1.Selector{Ids: []string{b.id}}})
	if err != nil {
		t.Fatal(explain(err))
	}
	if l := all[b.id].last; l.GetPhase() != "failed" || l.GetError().GetKind() != "precondition" {
		t.Errorf("strict: %v", l)
	}
	if _, err := the.layers.Get(within(t, time.Minute), connect.NewRequest(&harenav1.GetLayerRequest{Name: "scn-findings:2"})); err == nil {
		t.Error("what was refused has a name")
	}
}

// One answer for one request; several sandboxes in one call, of which one does not exist.
func TestSnapshotRequests(t *testing.T) {
	a, b := create(t), create(t)
	req := &harenav1.SnapshotRequest{Name: "scn-requests:1", RequestId: "scn-requests-" + a.id}
	first := a.snapshot(req)
	a.must("echo x > /srv/x")
	again := a.snapshot(req)
	if first.last.GetLayer().GetDigest() != again.last.GetLayer().GetDigest() {
		t.Error("a repeated request made another snapshot")
	}
	all, err := snapshot(within(t, time.Minute), &harenav1.SnapshotRequest{Name: "scn-requests:2", RequestId: req.GetRequestId(), Selector: &harenav1.Selector{Ids: []string{a.id}}})
	if err != nil {
		t.Fatal(explain(err))
	}
	if all[a.id].last.GetError().GetKind() != "exists" {
		t.Errorf("the same ID for another request: %v", all[a.id].last)
	}
	missing := a.id[:6] + "aaaaaaaaaaaaaa"
	all, err = snapshot(within(t, time.Minute), &harenav1.SnapshotRequest{Name: "scn-many:1", Selector: &harenav1.Selector{Ids: []string{a.id, missing, b.id}}})
	if err != nil {
		t.Fatal(explain(err))
	}
	if all[missing].last.GetError().GetKind() != "not-found" || all[a.id].last.GetPhase() != "done" || all[b.id].last.GetPhase() != "done" {
		t.Errorf("several: %v", all)
	}
	for _, x := range []*box{a, b} {
		name := "scn-many-" + x.id + ":1"
		if got := all[x.id].last.GetLayer().GetName(); got != name {
			t.Errorf("name %q", got)
		}
		removeName(name)
	}
}

// Files are of one instant while they are written, and the writer goes on.
func TestSnapshotWhileWriting(t *testing.T) {
	b := create(t)
	b.start(&harenav1.Command{Shell: `i=0; while :; do i=$((i+1)); echo $i >> /srv/a; echo $i >> /srv/b; done`})
	eventually(t, "it writes", 10*time.Second, func() bool { return b.sh("cat /srv/b").GetExitCode() == 0 })
	for i := range 5 {
		name := fmt.Sprintf("scn-writing:%d", i)
		b.snapshot(&harenav1.SnapshotRequest{Name: name})
		c := create(t, from(name))
		var x, y int
		if _, err := fmt.Sscan(c.must("wc -l < /srv/a; wc -l < /srv/b"), &x, &y); err != nil || x != y && x != y+1 || x == 0 {
			t.Errorf("a has %d lines and b has %d: %v", x, y, err)
		}
	}
	was := b.must("wc -l < /srv/b")
	eventually(t, "it goes on", 10*time.Second, func() bool { return b.must("wc -l < /srv/b") != was })
}

// A stop wins over a snapshot, snapshots go beside each other, and nothing is left.
func TestSnapshotRaces(t *testing.T) {
	b := create(t)
	b.must("head -c 100000000 /dev/urandom > /srv/big")
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			_, _ = snapshot(t.Context(), &harenav1.SnapshotRequest{Name: fmt.Sprintf("scn-races:%d", i), Selector: &harenav1.Selector{Ids: []string{b.id}}})
			removeName(fmt.Sprintf("scn-races:%d", i))
		})
	}
	time.Sleep(30 * time.Millisecond)
	if err := stop(within(t, time.Minute), b.id); err != nil {
		t.Error(explain(err))
	}
	wg.Wait()
	if the.own != nil {
		doctor(t)
	}
}

// The server is killed while snapshots and forks are taken: each is complete or absent, and what was frozen runs.
func TestServerKilledDuringSnapshots(t *testing.T) {
	own := needOwn(t)
	b := create(t)
	b.must("head -c 30000000 /dev/urandom > /srv/big; for i in $(seq 300); do echo $i > /srv/f$i; done")
	want := b.must("sha256sum /srv/big | cut -d' ' -f1")
	for round := range count(4, 40) {
		name := fmt.Sprintf("scn-killed:%d", round)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if round%2 == 1 {
				_, _ = the.sandboxes.Fork(t.Context(), connect.NewRequest(&harenav1.ForkRequest{Id: b.id, Count: 12, Labels: map[string]string{"crash": "yes"}}))
				return
			}
			_, _ = snapshot(t.Context(), &harenav1.SnapshotRequest{Name: name, Selector: &harenav1.Selector{Ids: []string{b.id}}})
		}()
		time.Sleep(time.Duration(20+round*60%400) * time.Millisecond)
		own.kill()
		<-done
		if err := own.start(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if got := b.must("echo alive"); got != "alive" {
			t.Errorf("round %d: %q", round, got)
		}
		if _, err := the.layers.Get(within(t, time.Minute), connect.NewRequest(&harenav1.GetLayerRequest{Name: name})); err == nil {
			c := create(t, from(name))
			if got := c.must("sha256sum /srv/big | cut -d' ' -f1; ls /srv | wc -l"); got != want+"\n301" {
				t.Errorf("round %d: %q", round, got)
			}
			removeName(name)
		}
		list, err := the.sandboxes.List(within(t, time.Minute), connect.NewRequest(&harenav1.ListRequest{Labels: map[string]string{"crash": "yes"}}))
		if err != nil {
			t.Fatal(explain(err))
		}
		if n := len(list.Msg.GetSandboxes()); n != 0 && n != 12 {
			t.Errorf("round %d: %d of 12 forks are there", round, n)
		}
		stopCrashed(t)
		doctor(t)
	}
}
