package main

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"runtime"

	guestv1 "github.com/harena-dev/harena/api/harena/guest/v1"
	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/api/harena/v1/harenav1connect"
	"github.com/harena-dev/harena/internal/cgroup"
	"github.com/harena-dev/harena/internal/sandbox"
	"github.com/harena-dev/harena/internal/supervisor"
	"github.com/harena-dev/harena/internal/supervisor/exec"
	"github.com/harena-dev/harena/internal/supervisor/files"
	"github.com/harena-dev/harena/internal/supervisor/journal"
	"github.com/harena-dev/harena/internal/supervisor/launch"
	"github.com/harena-dev/harena/internal/supervisor/oplog"
	"github.com/harena-dev/harena/internal/supervisor/users"
)

// prepared starts containers.
type prepared struct{ *launch.Prepared }

func prepare() (supervisor.Prepared, error) {
	p, err := launch.Prepare(nil)
	if err != nil {
		return nil, err
	}
	return prepared{p}, nil
}

// Launch implements supervisor.Prepared.
func (p prepared) Launch(ctx context.Context, l *guestv1.Launch) (supervisor.Sandbox, error) {
	s, err := p.Prepared.Launch(ctx, l)
	if err != nil {
		return nil, err
	}
	return container{s}, nil
}

type container struct{ *launch.Sandbox }

// Services implements supervisor.Sandbox.
func (c container) Services(e supervisor.Env) (supervisor.Services, error) {
	id, err := sandbox.ParseID(e.Launch.GetSandboxId())
	if err != nil {
		return supervisor.Services{}, err
	}
	groups := e.Launch.GetCgroups()
	defaultUser := e.Launch.GetProcess().GetUser()

	ops, err := journal.Open(filepath.Join(e.Launch.GetDir(), "commands", "ops"), journal.Ops)
	if err != nil {
		return supervisor.Services{}, err
	}
	opLog, err := oplog.Open(oplog.Config{
		Dir: filepath.Join(e.Launch.GetDir(), "log"), Header: logHeader(e.Launch), Log: e.Log,
	})
	if err != nil {
		return supervisor.Services{}, err
	}

	// Users are found in files, and files are worked on as users.
	var fileService *files.Service
	lookup := users.New(users.Config{
		Read: func(ctx context.Context, path string, most int64) ([]byte, error) {
			return fileService.ReadSmall(ctx, path, most)
		},
		Root:        c.Root,
		DefaultUser: defaultUser,
	})
	fileService = files.New(files.Config{
		SandboxID: id, Starter: c.Sandbox, Users: lookup, DefaultUser: defaultUser, Activity: e.Activity, Log: e.Log,
		Journal: ops, OpLog: opLog,
	})
	execService, err := exec.New(exec.Config{
		SandboxID: id,
		Hostname:  e.Launch.GetHostname(),
		Spawner:   c.Spawner(),
		Users:     lookup,
		Groups:    cgroup.Dir(groups.GetTracking()),
		Devpts:    c.Devpts,
		IDBase:    e.Launch.GetIdBase(),
		RecordDir: filepath.Join(e.Launch.GetDir(), "commands"),
		Defaults:  e.Launch.GetProcess(),
		OOMKills: func() int64 {
			n, err := cgroup.OOMKills(cgroup.Dir(groups.GetTracking()), groups.GetV1())
			if err != nil {
				e.Log.Warn("out-of-memory kills cannot be counted", "error", err)
			}
			return n
		},
		Activity:  e.Activity,
		Log:       e.Log,
		Journal:   ops,
		OpLog:     opLog,
		FilesOnly: e.Launch.GetFilesOnly(),
	})
	if err != nil {
		return supervisor.Services{}, err
	}

	options := supervisor.HandlerOptions()
	return supervisor.Services{
		Handlers: map[string]func() http.Handler{
			"/" + harenav1connect.ExecServiceName + "/": func() http.Handler {
				_, h := execService.Handler(options)
				return h
			},
			"/" + harenav1connect.FileServiceName + "/": func() http.Handler {
				_, h := harenav1connect.NewFileServiceHandler(fileService, options)
				return h
			},
			"/v1/sandboxes/": func() http.Handler {
				// The edge's side and the worker's side of a transfer take a core each.
				runtime.GOMAXPROCS(2)
				return fileService.HTTP()
			},
		},
		Running: execService.Running,
		Hold:    execService.Hold,
		Close: func() error {
			fileService.Close()
			return errors.Join(execService.Close(), opLog.Close())
		},
	}, nil
}

// logHeader says what a sandbox is made from, for those who run its log again.
func logHeader(l *guestv1.Launch) *harenav1.LogHeader {
	h := &harenav1.LogHeader{SandboxId: l.GetSandboxId(), Spec: l.GetSpec()}
	for i := len(l.GetLowers()) - 1; i >= 0; i-- {
		h.Layers = append(h.Layers, "sha256:"+filepath.Base(l.GetLowers()[i]))
	}
	return h
}
