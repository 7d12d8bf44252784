package blobtest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/harena-dev/harena/internal/storage/blob"
)

// Server is a real S3 server that a test started.
type Server struct {
	Endpoint    string // host:port, plain HTTP
	Credentials blob.Credentials
	client      *minio.Client
	buckets     int
}

// Versity starts versitygw, a small S3 server on a directory. The test is
// skipped when the program is not there (make test builds it).
func Versity(t *testing.T) *Server {
	t.Helper()
	program := look(t, "versitygw")
	data := t.TempDir()
	port := freePort(t)
	s := newServer(t, port)
	cmd := exec.Command(program, "--quiet", "--port", s.Endpoint, "--keep-alive", "posix", data)
	cmd.Env = []string{"ROOT_ACCESS_KEY=" + s.Credentials.AccessKey, "ROOT_SECRET_KEY=" + s.Credentials.SecretKey}
	start(t, cmd)
	s.await(t)
	return s
}

// SeaweedFS starts a SeaweedFS with its S3 server and a mount of its file system at
// the directory it returns, which shows other objects than the buckets do. The test is
// skipped when the program is not there (make soak builds it: it takes long).
func SeaweedFS(t *testing.T) (s *Server, mount string) {
	t.Helper()
	program := look(t, "weed")
	dir, mount := t.TempDir(), t.TempDir()
	s = newServer(t, freePort(t))
	config := filepath.Join(dir, "s3.json")
	identity := fmt.Sprintf(`{"identities":[{"name":"test","credentials":[{"accessKey":%q,"secretKey":%q}],"actions":["Admin"]}]}`,
		s.Credentials.AccessKey, s.Credentials.SecretKey)
	if err := os.WriteFile(config, []byte(identity), 0o600); err != nil {
		t.Fatal(err)
	}
	// The gRPC ports of the master, volume and filer servers are theirs plus 10,000, or as given.
	ports := make([]string, 7)
	for i := range ports {
		ports[i] = freePort(t)
	}
	_, s3Port, _ := net.SplitHostPort(s.Endpoint)
	cmd := exec.Command(program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir="+dir, "-filer", "-s3",
		"-master.port="+ports[0], "-master.port.grpc="+ports[1], "-volume.port="+ports[2], "-volume.port.grpc="+ports[3],
		"-filer.port="+ports[4], "-filer.port.grpc="+ports[5], "-s3.port="+s3Port, "-s3.port.grpc="+ports[6], "-s3.config="+config,
		"-master.volumeSizeLimitMB=64", "-volume.max=100", "-master.telemetry=false")
	cmd.Dir = dir
	start(t, cmd)
	s.await(t)
	fuse := exec.Command(program, "-logtostderr=true", "mount", "-dir="+mount, "-filer=127.0.0.1:"+ports[4]+"."+ports[5], "-dirAutoCreate=false",
		"-cacheDir="+filepath.Join(dir, "cache"))
	t.Cleanup(func() { _ = exec.Command("umount", "-l", mount).Run() })
	start(t, fuse)
	for range 300 {
		if exec.Command("mountpoint", "-q", mount).Run() == nil {
			return s, mount
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("SeaweedFS's file system was not mounted")
	return nil, ""
}

func look(t *testing.T, name string) string {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%s is not there", name)
	}
	return program
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func newServer(t *testing.T, port string) *Server {
	t.Helper()
	s := &Server{Endpoint: "127.0.0.1:" + port, Credentials: blob.Credentials{AccessKey: "tester", SecretKey: "a secret of tests"}}
	var err error
	s.client, err = minio.New(s.Endpoint, &minio.Options{
		Creds: credentials.NewStaticV4(s.Credentials.AccessKey, s.Credentials.SecretKey, ""), BucketLookup: minio.BucketLookupPath, MaxRetries: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// start runs a program until the test ends; its output is shown when the test failed.
func start(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s: …%s", filepath.Base(cmd.Path), text[max(0, len(text)-4000):])
		}
	})
}

func (s *Server) await(t *testing.T) {
	t.Helper()
	var err error
	for range 600 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err = s.client.ListBuckets(ctx)
		cancel()
		if err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("the server at %s does not answer: %v", s.Endpoint, err)
}

// Bucket makes a bucket and returns the options for a store in it.
func (s *Server) Bucket(t *testing.T, prefix string) blob.S3Options {
	t.Helper()
	s.buckets++
	o := blob.S3Options{Endpoint: s.Endpoint, Plain: true, Region: "us-east-1", Bucket: fmt.Sprintf("bucket-%d", s.buckets), Prefix: prefix, Credentials: s.Credentials}
	if err := s.client.MakeBucket(context.Background(), o.Bucket, minio.MakeBucketOptions{}); err != nil {
		t.Fatalf("make a bucket: %v", err)
	}
	return o
}

// URL is what blob.Open takes for a bucket; the credentials come from the environment.
func (s *Server) URL(o blob.S3Options) string {
	return fmt.Sprintf("s3://%s/%s?endpoint=http://%s&region=%s", o.Bucket, o.Prefix, o.Endpoint, o.Region)
}
