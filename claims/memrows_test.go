package claims_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// memRows is the table of a queue in a memDB. Each statement takes effect at one moment, and locks nothing.
type memRows struct {
	objects.RowsTable // nil: what the simulation does not use

	d       *memDB
	watcher jobsWatcher
	perKey  int // so many rows of a key are claimed at once; 0: any number

	jobs map[string]*memJob // guarded by the database's mutex
}

type memJob struct {
	objects.Claim
	key     string
	readyAt time.Time // it is not taken before; by the database's clock
	done    bool
	since   time.Time // when its owner last changed
}

// jobsWatcher is told of each write of a row as it lands, under the database's mutex.
type jobsWatcher interface {
	jobTaken(ctx context.Context, job *memJob)
	jobFreed(ctx context.Context, before objects.Claim, how *objects.Ending) // nil: as a row of a session that has ended
}

func (r *memRows) isReady(j *memJob) bool {
	return j.Session == "" && !j.done && !r.d.now().Before(j.readyAt)
}

// isFull reports whether no more rows with the key of a row may be claimed, and when a claim on such a row last began or ended.
func (r *memRows) isFull(of *memJob) (full bool, since time.Time) {
	claimed := 0
	for _, j := range r.jobs {
		if j.key == of.key {
			since = later(since, j.since)
			if j.Session != "" {
				claimed++
			}
		}
	}
	return r.perKey > 0 && claimed >= r.perKey, since
}

func (r *memRows) LongestKey() int { return 0 }

func (r *memRows) Check(context.Context, time.Duration) error { return nil }

func (r *memRows) Look(_ context.Context, _ string, ids []string, _ time.Duration) (found []objects.Claim, err error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	for _, id := range ids {
		if j := r.jobs[id]; j != nil {
			found = append(found, j.Claim)
		}
	}
	return found, nil
}

func (r *memRows) Owned(_ context.Context, session, _, afterID string, n int, _ time.Duration) ([]objects.Claim, error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	var owned []objects.Claim
	for _, j := range r.sorted(func(j *memJob) bool { return j.Session == session && j.ID > afterID }, n) {
		owned = append(owned, j.Claim)
	}
	return owned, nil
}

func (r *memRows) sorted(which func(*memJob) bool, n int) (jobs []*memJob) {
	for _, j := range r.jobs {
		if which(j) {
			jobs = append(jobs, j)
		}
	}
	slices.SortFunc(jobs, func(a, b *memJob) int { return cmp.Compare(a.ID, b.ID) })
	return jobs[:min(n, len(jobs))]
}

func (r *memRows) Sessions(context.Context, time.Duration) ([]objects.Session, error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	named := make(map[string]bool)
	for _, j := range r.jobs {
		named[j.Session] = true
	}
	return r.d.sessions(named), nil
}

func (r *memRows) TakeReady(ctx context.Context, take objects.Taking, _ time.Duration) (taken []objects.Claim, err error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	if _, begun := r.d.record(take.Session); take.Remote && !begun {
		return nil, objects.ErrEnded
	}
	for _, j := range r.sorted(func(j *memJob) bool {
		return r.isReady(j) && !slices.Contains(take.Skip, j.ID) && (take.Only == nil || slices.Contains(take.Only, j.ID))
	}, len(r.jobs)) {
		if full, _ := r.isFull(j); full {
			continue
		}
		if len(taken) == take.N {
			break
		}
		j.Session, j.Token, j.since = take.Session, max(j.Token+1, r.d.now().UnixMicro()), time.Now()
		taken = append(taken, j.Claim)
		r.watcher.jobTaken(ctx, j)
	}
	return taken, nil
}

func (r *memRows) Ready(_ context.Context, take objects.Taking, _ time.Duration) (sight objects.Sight, err error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	for _, j := range r.sorted(func(j *memJob) bool {
		full, _ := r.isFull(j)
		return !full && r.isReady(j) && !slices.Contains(take.Skip, j.ID)
	}, take.N) {
		sight.IDs = append(sight.IDs, j.ID)
	}
	return sight, nil
}

func (r *memRows) Free(ctx context.Context, session, _ string, ids []string, tokens []int64, _ objects.Freeing, _ time.Duration) ([]objects.Claim, error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	for i, id := range ids {
		if j := r.jobs[id]; j != nil && j.Session == session && j.Token == tokens[i] {
			r.free(ctx, j, nil)
		}
	}
	return nil, nil
}

func (r *memRows) free(ctx context.Context, j *memJob, how *objects.Ending) {
	before := j.Claim
	j.Session, j.since = "", time.Now()
	if how != nil {
		j.done, j.readyAt = how.Done, r.d.now().Add(how.After)
	}
	r.watcher.jobFreed(ctx, before, how)
}

func (r *memRows) End(ctx context.Context, how objects.Ending, claims []objects.Claim, _ time.Duration) (ended []objects.Claim, err error) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	var stand []*memJob
	for _, c := range claims {
		if j := r.jobs[c.ID]; j != nil && j.Session == c.Session && j.Token == c.Token {
			stand = append(stand, j)
		} else {
			ended = append(ended, c)
		}
	}
	if how.All && len(ended) > 0 {
		return ended, nil
	}
	for _, j := range stand {
		r.free(ctx, j, &how)
	}
	return ended, nil
}
