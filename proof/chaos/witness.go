package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/proctree"
	"github.com/tenurelib/tenure/witness"
)

const (
	witnessEnv = "TENURE_CHAOS_WITNESS" // is set for the witness of a replica

	killedAlone  = "kill -9"
	killedBoth   = "kill -9 of a witness, then its replica"
	killedUnseen = "kill -9 under a stopped witness"

	notWitnessed = "its term names no witness"
	notFree      = "a former job's processes are not dead"
)

// beWitness is main for the witness of a replica, which reaches the server as the replica does.
func beWitness(replica string) error {
	var cfg replicaConfig
	if err := json.Unmarshal([]byte(replica), &cfg); err != nil {
		return err
	}
	os.Unsetenv(witnessEnv)
	status, err := witness.Run(witness.Config{Young: -1, Open: func(ctx context.Context) (tenure.Store, error) {
		return tenure.OpenPostgres(ctx, cfg.URL, tenure.PostgresConfig{})
	}}, "/proc/self/exe")
	if err == nil {
		os.Exit(status)
	}
	return err
}

// named returns the configuration of a replica under a witness: its connections can be told by the witness's tag.
func (cfg replicaConfig) named() replicaConfig {
	if u, err := url.Parse(cfg.URL); err == nil && cfg.Lock != "" {
		q := u.Query()
		q.Set("application_name", cfg.Name+" "+os.Getenv("PGAPPNAME"))
		u.RawQuery = q.Encode()
		cfg.URL = u.String()
	}
	return cfg
}

// lock takes the lock of the job, if the replica has a witness, together with a process that it starts: the kernel frees
// the lock when both are dead. It returns what is wrong.
func (r *replica) lock(term *tenure.Term) (wrong string, unlock func(), err error) {
	if r.Lock == "" {
		return "", func() {}, nil
	}
	lock, err := os.OpenFile(r.Lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", nil, err
	}
	if !term.Witnessed() {
		wrong = notWitnessed
	}
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		wrong = notFree
	}
	helper := exec.Command("sleep", "1000")
	helper.ExtraFiles = []*os.File{lock}
	helper.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // so that the end of the replica's group is not its own
	err = helper.Start()
	return wrong, func() {
		if err == nil {
			helper.Process.Kill()
			helper.Wait()
		}
		lock.Close()
	}, err
}

// signal sends a signal to the replica. A witness would not pass on each.
func (p *process) signal(s syscall.Signal) error {
	if p.cfg.Lock == "" {
		return p.Signal(s)
	}
	<-p.said
	for _, d := range proctree.Descendants(p.PID()) {
		if d.Parent == p.PID() {
			return syscall.Kill(d.PID, s)
		}
	}
	return fmt.Errorf("%s has ended", p.name())
}

// witnessKinds are the faults of witnesses.
func (p *phase) witnessKinds() []faultKind {
	if p.task != useWitness {
		return nil
	}
	return []faultKind{
		{name: killedAlone, group: "process", weight: 10, passes: true, begin: kill}, // more of what this phase is about
		{name: killedBoth, group: "process", weight: 2, begin: killUnder(syscall.SIGKILL)},
		{name: killedUnseen, group: "process", weight: 2, begin: killUnder(syscall.SIGSTOP)},
	}
}

// killUnder sends a signal to a replica's witness, and then kills the replica. The lease has to expire.
func killUnder(s syscall.Signal) func(context.Context, *phase) (string, ending, error) {
	return func(_ context.Context, p *phase) (string, ending, error) {
		victims := p.victims(1)
		var at time.Duration
		for _, v := range victims {
			err := v.signal(syscall.SIGSTOP) // then it starts nothing more
			replica := proctree.Descendants(v.PID())
			if err := errors.Join(err, v.Signal(s)); err != nil {
				return "", nil, err
			}
			for _, d := range replica { // also what its job has started: nobody else will
				syscall.Kill(d.PID, syscall.SIGKILL)
			}
			at = monotonic()
			p.record.add(event{At: at, Replica: v.name(), Kind: killed})
		}
		return names(victims), func() (time.Duration, error) {
			for _, v := range victims {
				var exit *exec.ExitError
				if err := v.Signal(syscall.SIGCONT); err != nil {
					return at, err
				}
				if err := v.wait(); err != nil && !errors.As(err, &exit) {
					return at, err
				}
			}
			return at, startAll(victims)
		}, nil
	}
}

// checkWitnessed looks for terms that a witness released too early, or not at all although it could.
func (r *result) checkWitnessed(p *phase, jobs []job) {
	if p.task != useWitness {
		return
	}
	for _, e := range p.record.sorted() {
		// A lock that is not free without a job that still runs is a dead one's.
		if e.Kind == jobStarted && (e.Note == notWitnessed || e.Note == notFree && !slices.ContainsFunc(jobs, func(j job) bool {
			return j.term != e.Term && j.from <= e.At && e.At < j.to
		})) {
			r.violate("%s began a job with token %d at %v: %s\n%s", e.Replica, e.Token, e.At, e.Note, p.around(e.At, e.At))
		}
	}
	for _, f := range p.record.faults {
		if f.kind != killedAlone || !p.alone(f) {
			continue
		}
		for i, j := range jobs {
			if !j.death || j.to < f.from || j.to > f.begun || !strings.Contains(f.target, j.replica) || i+1 == len(jobs) {
				continue
			}
			// It would have expired two thirds of a TTL after the kill at the earliest.
			took, most := jobs[i+1].from-j.to, p.ttl/2+p.stalledFor(j.to, j.to+p.ttl)
			r.releases = append(r.releases, took)
			if took > most {
				r.violate("the term of %s, token %d, was not released when it was killed at %v: the next job began after %v, allowed are %v\n%s",
					j.replica, j.token, j.to, took, most, p.around(j.to, j.to+took))
			}
		}
	}
}
