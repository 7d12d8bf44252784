package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	harenav1 "github.com/harena-dev/harena/api/harena/v1"
	"github.com/harena-dev/harena/internal/errs"
	"github.com/harena-dev/harena/internal/sandbox"
)

const (
	// defaultStopAfter is how long after its lease lapsed a job's sandboxes stay paused.
	defaultStopAfter = time.Hour
	// keepJob is how long a lease that stopped its job is kept, and nothing can join the job.
	keepJob = 24 * time.Hour
	// retryJob: what a lapse could not do to some sandbox is tried again.
	retryJob = time.Minute
	// maxJobs bounds the leases of an edge.
	maxJobs = 10_000
	// maxLease keeps sums of times within what they can hold.
	maxLease = 10 * 365 * 24 * time.Hour
)

// leaseState is where a job's lease is.
type leaseState string

const (
	leaseActive  leaseState = "active"
	leaseLapsed  leaseState = "lapsed"
	leaseStopped leaseState = "stopped"
)

// jobKey names a job.
type jobKey struct{ project, name string }

func jobOf(r *Record) jobKey { return jobKey{r.Project, r.Spec.GetJob()} }

// lease is what is known of a job's lease, in memory and on disk. It is written before the effect that it describes.
type lease struct {
	Format    int           `json:"format"`
	Project   string        `json:"project"`
	Name      string        `json:"name"`
	Duration  time.Duration `json:"duration"`
	OnLapse   string        `json:"on_lapse"`
	StopAfter time.Duration `json:"stop_after"`
	Renewed   time.Time     `json:"renewed"`
	State     leaseState    `json:"state"`
	// Done: what the state means for the sandboxes has been done to all of them.
	Done bool `json:"done"`
}

func (l *lease) key() jobKey { return jobKey{l.Project, l.Name} }

func (l *lease) lapses() time.Time { return l.Renewed.Add(l.Duration) }

// stops is when the job's sandboxes are stopped; zero: never.
func (l *lease) stops() time.Time {
	switch {
	case l.OnLapse == "stop":
		return l.lapses()
	case l.StopAfter == 0:
		return time.Time{}
	}
	return l.lapses().Add(l.StopAfter)
}

// leaseStep is what to do about a lease now, or when to look again; no next means never.
type leaseStep struct {
	to     leaseState // "": nothing
	again  bool       // the effects of its state
	forget bool
	next   time.Time
}

func (s leaseStep) due() bool { return s.to != "" || s.again || s.forget }

// decideLease is the whole policy of leases of jobs. It has no effects.
func decideLease(l lease, now time.Time) leaseStep {
	due := func(t time.Time) bool { return !t.IsZero() && !t.After(now) }
	switch l.State {
	case leaseActive:
		switch {
		case due(l.stops()):
			return leaseStep{to: leaseStopped}
		case due(l.lapses()):
			return leaseStep{to: leaseLapsed}
		}
		return leaseStep{next: l.lapses()}
	case leaseLapsed:
		switch {
		case due(l.stops()):
			return leaseStep{to: leaseStopped}
		case !l.Done:
			return leaseStep{again: true}
		}
		return leaseStep{next: l.stops()}
	case leaseStopped:
		end := l.stops().Add(keepJob)
		switch {
		case !l.Done:
			return leaseStep{again: true}
		case due(end):
			return leaseStep{forget: true}
		}
		return leaseStep{next: end}
	}
	return leaseStep{}
}

// jobs are the leases of an edge.
type jobs struct {
	files leaseFiles
	wake  chan struct{}

	mu    sync.Mutex
	all   map[jobKey]lease
	busy  map[jobKey]bool      // a step is being taken
	retry map[jobKey]time.Time // a step failed, and is tried again then
}

// begin reports whether the caller may take a step of a lease; then it must call end.
func (j *jobs) begin(k jobKey, now time.Time) (bool, time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.busy[k] {
		return false, time.Time{}
	}
	if at := j.retry[k]; at.After(now) {
		return false, at
	}
	j.busy[k] = true
	return true, time.Time{}
}

func (j *jobs) end(k jobKey, retry time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.busy, k)
	delete(j.retry, k)
	if !retry.IsZero() {
		j.retry[k] = retry
	}
	j.poke()
}

// is reports whether a lease is still as it was.
func (j *jobs) is(l lease) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	now, there := j.all[l.key()]
	return there && now == l
}

// closed says why no sandbox may join a job; nil when one may.
func (j *jobs) closed(k jobKey) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if l, there := j.all[k]; there && l.State != leaseActive {
		return errs.E(errs.Precondition, "the lease of job %s lapsed at %s", k.name, l.lapses().UTC().Format(time.RFC3339)).
			On("job %s", k.name).WithHint("renew it with `harena job lease %s`", k.name)
	}
	return nil
}

// change replaces a lease by what f makes of it, on disk and then in memory. f gets nil when there is none.
func (j *jobs) change(k jobKey, f func(*lease) (lease, error)) (lease, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var old *lease
	if l, there := j.all[k]; there {
		old = &l
	} else if len(j.all) >= maxJobs {
		return lease{}, errs.OverLimit(errs.Capacity, "leases of jobs on this edge", maxJobs, len(j.all)+1).WithHint("end some with a lease of 0")
	}
	l, err := f(old)
	if err != nil {
		return lease{}, err
	}
	if err := j.files.write(l); err != nil {
		return lease{}, err
	}
	j.all[k] = l
	j.poke()
	return l, nil
}

func (j *jobs) drop(k jobKey) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.files.remove(k); err != nil {
		return err
	}
	delete(j.all, k)
	return nil
}

func (j *jobs) poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

func (j *jobs) list() []lease {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := make([]lease, 0, len(j.all))
	for _, l := range j.all {
		all = append(all, l)
	}
	return all
}

// LeaseJob gives a job a lease, renews, changes or ends it.
func (e *Edge) LeaseJob(_ context.Context, req *harenav1.LeaseJobRequest) (*harenav1.LeaseJobResponse, error) {
	k := jobKey{req.GetProject(), req.GetJob()}
	if err := sandbox.ValidateJob(k.name); err != nil {
		return nil, err
	}
	d := duration(req.GetLease())
	for what, v := range map[string]time.Duration{"lease": d, "stop_after": duration(req.GetStopAfter())} {
		if v < 0 || v > maxLease {
			return nil, errs.OverLimit(errs.Invalid, what+" of a job", maxLease, v)
		}
	}
	if p := req.GetOnLapse(); p != "" && p != "pause" && p != "stop" {
		return nil, errs.E(errs.Invalid, "on_lapse %.40q is not known", p).WithHint("use one of pause, stop")
	}
	if req.GetLease() != nil && d == 0 {
		if err := e.jobs.drop(k); err != nil {
			return nil, err
		}
		e.jobEvent("job.lease-ended", k, "", nil)
		return &harenav1.LeaseJobResponse{Job: e.job(k)}, nil
	}
	was := leaseState("")
	l, err := e.jobs.change(k, func(old *lease) (lease, error) {
		l := lease{Format: recordFormat, Project: k.project, Name: k.name, OnLapse: "pause", StopAfter: defaultStopAfter}
		if old != nil {
			l, was = *old, old.State
		} else if d == 0 {
			return l, errs.E(errs.Precondition, "job %s has no lease that could be renewed", k.name).On("job %s", k.name).
				WithHint("say for how long: `harena job lease %s D`", k.name)
		}
		if d > 0 {
			l.Duration = d
		}
		if p := req.GetOnLapse(); p != "" {
			l.OnLapse = p
		}
		if req.GetStopAfter() != nil {
			l.StopAfter = duration(req.GetStopAfter())
		}
		l.Renewed, l.State, l.Done = e.clock.Now(), leaseActive, false
		return l, nil
	})
	if err != nil {
		return nil, err
	}
	// Not every renewal: a trainer renews every few seconds.
	if was != leaseActive {
		e.jobEvent("job.leased", k, "", map[string]string{"duration": l.Duration.String(), "on_lapse": l.OnLapse})
	}
	return &harenav1.LeaseJobResponse{Job: e.job(k)}, nil
}

func (e *Edge) jobEvent(kind string, k jobKey, message string, attributes map[string]string) {
	e.events.Append(&harenav1.Event{Kind: kind, Message: message, Job: k.name, Project: k.project, Attributes: attributes})
}

// job describes one job.
func (e *Edge) job(k jobKey) *harenav1.Job {
	for _, j := range e.listJobs(func(other jobKey) bool { return other == k }) {
		return j
	}
	return &harenav1.Job{Name: k.name, Project: k.project}
}

// ListJobs lists the jobs that a live sandbox belongs to, or that have a lease.
func (e *Edge) ListJobs(req *harenav1.ListJobsRequest) *harenav1.ListJobsResponse {
	return &harenav1.ListJobsResponse{Jobs: e.listJobs(func(k jobKey) bool { return inProject(k.project, req.GetProject()) })}
}

func (e *Edge) listJobs(want func(jobKey) bool) []*harenav1.Job {
	found := map[jobKey]*harenav1.Job{}
	get := func(k jobKey) *harenav1.Job {
		if found[k] == nil {
			found[k] = &harenav1.Job{Name: k.name, Project: k.project, SandboxesByState: map[string]int64{}}
		}
		return found[k]
	}
	for _, b := range e.snapshot() {
		if r := b.record(); r.Spec.GetJob() != "" && r.State.Live() && want(jobOf(r)) {
			get(jobOf(r)).SandboxesByState[string(r.State)]++
		}
	}
	for _, l := range e.jobs.list() {
		if want(l.key()) {
			get(l.key()).Lease = l.view()
		}
	}
	all := make([]*harenav1.Job, 0, len(found))
	for _, j := range found {
		all = append(all, j)
	}
	slices.SortFunc(all, func(a, b *harenav1.Job) int {
		if c := strings.Compare(a.GetProject(), b.GetProject()); c != 0 {
			return c
		}
		return strings.Compare(a.GetName(), b.GetName())
	})
	return all
}

func (l *lease) view() *harenav1.JobLease {
	v := &harenav1.JobLease{
		Duration: durationpb.New(l.Duration), OnLapse: l.OnLapse, StopAfter: durationpb.New(l.StopAfter),
		Renewed: timestamppb.New(l.Renewed), Lapses: timestamppb.New(l.lapses()), State: string(l.State),
	}
	if t := l.stops(); !t.IsZero() {
		v.Stops = timestamppb.New(t)
	}
	return v
}

// openJobs reads the leases that an earlier server kept.
func (e *Edge) openJobs() error {
	e.jobs.files = leaseFiles{dir: filepath.Join(e.records.root, "jobs")}
	e.jobs.wake = make(chan struct{}, 1)
	e.jobs.busy, e.jobs.retry = map[jobKey]bool{}, map[jobKey]time.Time{}
	var torn []string
	var err error
	e.jobs.all, torn, err = e.jobs.files.load()
	for _, path := range torn {
		e.log.Error("the lease of a job cannot be read, and is not in force", "file", path)
	}
	return err
}

// runJobs lets leases lapse, until ctx ends.
func (e *Edge) runJobs(ctx context.Context) {
	for {
		now := e.clock.Now()
		var next time.Time
		for _, l := range e.jobs.list() {
			s := decideLease(l, now)
			if s.due() {
				var mine bool
				if mine, s.next = e.jobs.begin(l.key(), now); mine {
					// One job's sandboxes may take long, and others' leases go on meanwhile.
					e.loops.Go(func() { e.jobs.end(l.key(), e.advanceLease(ctx, l, s)) })
				}
			}
			if !s.next.IsZero() && (next.IsZero() || s.next.Before(next)) {
				next = s.next
			}
		}
		var wait <-chan time.Time
		cancel := func() {}
		if !next.IsZero() {
			wait, cancel = e.clock.At(next)
		}
		select {
		case <-wait:
		case <-e.jobs.wake:
		case <-ctx.Done():
			cancel()
			return
		}
		cancel()
	}
}

// advanceLease takes a step that is due, and returns when to try again, if it failed.
func (e *Edge) advanceLease(ctx context.Context, l lease, s leaseStep) time.Time {
	if s.forget {
		if err := e.jobs.drop(l.key()); err != nil {
			e.log.Error("the lease of a job could not be removed", "job", l.Name, "err", err)
			return e.clock.Now().Add(retryJob)
		}
		return time.Time{}
	}
	if s.to != "" {
		changed, err := e.setLease(l, func(l *lease) { l.State, l.Done = s.to, false })
		switch {
		case errors.Is(err, errLeaseChanged):
			return time.Time{}
		case err != nil:
			e.log.Error("the lapse of a job's lease could not be recorded; it is tried again", "job", l.Name, "err", err)
			return e.clock.Now().Add(retryJob)
		}
		l = changed
		kind := map[leaseState]string{leaseLapsed: "job.lapsed", leaseStopped: "job.stopped"}[s.to]
		e.jobEvent(kind, l.key(), "its lease was not renewed", map[string]string{"renewed": l.Renewed.UTC().Format(time.RFC3339Nano)})
	}
	return e.applyLease(ctx, l)
}

// setLease changes a lease, if it is still as it was.
func (e *Edge) setLease(l lease, f func(*lease)) (lease, error) {
	return e.jobs.change(l.key(), func(old *lease) (lease, error) {
		if old == nil || *old != l {
			return lease{}, errLeaseChanged
		}
		f(&l)
		return l, nil
	})
}

// errLeaseChanged: it was renewed, or ended, meanwhile.
var errLeaseChanged = errors.New("the lease has changed")

// applyLease does to the sandboxes of a job what the state of its lease means. Nothing can join it meanwhile: the state was
// set before they are listed, and a creation looks at it as it joins. A renewal spares those whose turn has not come.
func (e *Edge) applyLease(ctx context.Context, l lease) time.Time {
	var members []*box
	for _, b := range e.snapshot() {
		if r := b.record(); jobOf(r) == l.key() && r.State.Live() {
			members = append(members, b)
		}
	}
	outcomes := e.each(ctx, members, func(b *box) error {
		switch {
		case !e.jobs.is(l):
			return nil
		case l.State == leaseStopped:
			return e.stop(ctx, b, stopCall{reason: sandbox.ReasonLease})
		}
		return e.pause(ctx, b, pauseCall{reason: sandbox.ReasonLease})
	})
	if ctx.Err() != nil {
		return time.Time{} // the next server goes on
	}
	var failed []string
	for i, o := range outcomes {
		// One that ended meanwhile has nothing more to lose.
		if o.GetError() != nil && members[i].state().Live() {
			failed = append(failed, fmt.Sprintf("%s: %s", o.GetSandboxId(), o.GetErrorMessage()))
		}
	}
	if len(failed) > 0 {
		e.log.Error("the lapse of a job's lease could not be brought about for some sandboxes; it is tried again", "job", l.Name, "failed", failed)
		return e.clock.Now().Add(retryJob)
	}
	if _, err := e.setLease(l, func(l *lease) { l.Done = true }); err != nil && !errors.Is(err, errLeaseChanged) {
		return e.clock.Now().Add(retryJob)
	}
	return time.Time{}
}
