//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/user"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// drainOptions are the flags of drain and undrain.
type drainOptions struct {
	options
	replica string
	session string
	lasts   time.Duration
	wait    time.Duration
	force   bool
}

func (o *drainOptions) replicaFlag(c *cobra.Command) {
	c.Flags().StringVar(&o.replica, "replica", "", "`NAME` of the replica")
}

func drainCommand(out *output) *cobra.Command {
	o := &drainOptions{}
	c := &cobra.Command{
		Use:   "drain --store STORE {--replica REPLICA | --session SESSION} [--for TIME] [--wait TIME] [--force]",
		Short: "make a replica release all that it holds, and take nothing",
		Long: `Drain marks a replica. The replica then releases its leases, keys, rows, slots and shards,
each as soon as its job or func has returned, and takes nothing, even after a restart, until
"tenure undrain" or until the mark has expired. Its process keeps running. The replica must
follow the mark: tenure run does, and so does a program whose configs name a tenure.Drain.

The store does not know which replicas there are: of a mistyped name, drain can only say
that the replica holds nothing and has no session. With --session, drain finds the replica
whose process has that session, as "tenure list --sessions" and "tenure owner" show it, and
prints its name.

With --wait, drain returns when the replica holds nothing. If no other replica takes one of
its leases within 5 s, drain says so. If the time runs out, it fails and names what the
replica still holds. Without --wait, it returns when the mark is stored. It
looks at the same leases as "tenure list". Claims that the replica has detached for another
process stay, and count as held. Marking a replica again restarts the time.`,
		PreRunE: func(*cobra.Command, []string) error {
			switch {
			case o.replica == "" && o.session == "":
				return usageError("no replica: give --replica, or --session to find it")
			case o.lasts < time.Second:
				return usageError("--for %v is below 1s", o.lasts)
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			var waited error
			err := o.store.with(c.Context(), func(short context.Context, store database) error {
				if err := o.findReplica(short, store); err != nil {
					return err
				}
				if !o.force {
					if err := o.checkNotLast(short, store); err != nil {
						return err
					}
				}
				looking, cancel := context.WithTimeout(short, storeTimeout/2) // what it sees is for notes only
				before, failed := o.lookAtReplica(looking, store, nil)
				cancel()
				mark := tenure.Drained{Replica: o.replica, By: userName(), Left: o.lasts}
				err := asUsage(tenure.SetDrain(short, store, mark))
				if err == nil {
					err = o.show(out, drainList{viewOfDrain(mark)})
				}
				if err != nil {
					return err
				}
				if p := o.store.alone(); p != nil {
					fmt.Fprintln(out.stderr, p.explain())
				} else if failed == nil && len(before.held) == 0 && !before.hasSession {
					fmt.Fprintf(out.stderr, "%s holds nothing and has no session; the store does not know whether there is a replica of that name\n", printable(o.replica))
				}
				if o.wait > 0 {
					waited = o.awaitDrained(c.Context(), out, store, before.leases)
				}
				return nil
			})
			return errors.Join(err, waited)
		},
	}
	o.storeFlags(c)
	o.replicaFlag(c)
	c.Flags().StringVar(&o.session, "session", "", "`ID` of a session of package claims, to find the replica by it")
	c.Flags().DurationVar(&o.lasts, "for", 24*time.Hour, "`TIME` after which the mark expires")
	c.Flags().DurationVar(&o.wait, "wait", 0, "`TIME` to wait until the replica holds nothing (default: no wait)")
	c.Flags().BoolVar(&o.force, "force", false, "drain even if no other replica has a session")
	o.jsonFlag(c)
	c.MarkFlagsMutuallyExclusive("replica", "session")
	return c
}

func undrainCommand(out *output) *cobra.Command {
	o := &drainOptions{}
	c := &cobra.Command{
		Use:   "undrain --store STORE --replica REPLICA",
		Short: "let a drained replica take part again",
		Long: `Undrain removes the mark of "tenure drain". The replica competes again at once. If
there is no mark, undrain says so, and succeeds.`,
		PreRunE: func(*cobra.Command, []string) error {
			if o.replica == "" {
				return usageError("no replica: give --replica")
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			return o.store.with(c.Context(), func(ctx context.Context, store database) error {
				err, outcome := tenure.ClearDrain(ctx, store, o.replica), "is no longer drained"
				if errors.Is(err, tenure.ErrNotFound) {
					err, outcome = nil, "is not drained"
				}
				if err == nil {
					_, err = fmt.Fprintln(out.stdout, printable(o.replica), outcome)
				}
				return err
			})
		},
	}
	o.storeFlags(c)
	o.replicaFlag(c)
	return c
}

// findReplica finds the replica of the session that was given.
func (o *drainOptions) findReplica(ctx context.Context, store database) error {
	if o.session == "" {
		return nil
	}
	record, err := readLease(ctx, store, sessionKey(o.session))
	if err == nil && record.State != stateHeld {
		err = fmt.Errorf("there is no session %s, or it has ended: \"tenure list --sessions\" shows the valid ones", printable(o.session))
	}
	o.replica = record.Holder
	return err
}

func userName() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return ""
}

// checkNotLast returns an error if sessions of the replica are the only ones. The store does not know which replicas
// stand by for a lease.
func (o *drainOptions) checkNotLast(ctx context.Context, store database) error {
	sessions, err := sessionsIn(ctx, store)
	has := false
	for _, v := range sessions {
		if v.State == stateHeld && v.Holder != o.replica {
			return nil
		}
		has = has || v.State == stateHeld
	}
	if err == nil && has {
		err = fmt.Errorf("%s is the only replica with a session, so no other would take what it releases; --force drains it all the same", printable(o.replica))
	}
	return err
}

// sessionsIn returns the sessions in a store; none if it can have none.
func sessionsIn(ctx context.Context, store database) (sessionList, error) {
	if _, ok := store.(backend); !ok {
		return nil, nil
	}
	sessions, unread, err := listSessions(ctx, store)
	if none := (*objects.NoTable)(nil); errors.As(err, &none) {
		return nil, nil
	}
	return sessions, errors.Join(err, unread)
}

// takeoverTime is how long drain --wait gives other replicas to take what was released.
const takeoverTime = 5 * time.Second

// awaitDrained returns nil when the replica holds nothing. It notes which of the leases that the replica had, no
// other has taken.
func (o *drainOptions) awaitDrained(ctx context.Context, out *output, store database, had []string) error {
	timeout := time.After(o.wait)
	var taken <-chan time.Time
	for {
		short, cancel := context.WithTimeout(ctx, storeTimeout)
		now, err := o.lookAtReplica(short, store, had)
		cancel()
		isDrained := err == nil && len(now.held) == 0
		if isDrained && len(now.untaken) == 0 {
			return nil
		}
		if isDrained && taken == nil {
			taken = time.After(takeoverTime)
		}
		over := false
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(watchInterval):
		case <-taken:
			over = isDrained
		case <-timeout:
			over = true
		}
		switch {
		case !over:
		case err != nil:
			return err
		case isDrained:
			_, err := fmt.Fprintf(out.stderr, "no other replica holds %s now: undrain one, or start another\n", strings.Join(now.untaken, ", "))
			return err
		default:
			return fmt.Errorf(`after %v, %s still holds %s: it has not stopped yet, has vanished, or does not follow the mark (its program must set CoordinatorConfig.Drain, or SessionConfig.Drain); the mark stays until it expires or "tenure undrain" removes it`,
				o.wait, printable(o.replica), strings.Join(now.held, ", "))
		}
	}
}

// replicaView is what the store knows of a replica.
type replicaView struct {
	held       []string // leases, and how many claims
	leases     []string // the keys of the leases in it
	untaken    []string // leases that the replica had, and that have no holder now
	hasSession bool
}

// lookAtReplica returns what the replica holds, and which of the leases that it had are without a holder.
func (o *drainOptions) lookAtReplica(ctx context.Context, store database, had []string) (r replicaView, err error) {
	leases, err := o.store.listAllLeases(ctx, store, &output{io.Discard, io.Discard})
	if err != nil {
		return r, err
	}
	r.untaken = slices.Clone(had)
	for _, v := range leases {
		key := printable(v.Key)
		if v.Holder == o.replica && v.State == stateHeld {
			r.held, r.leases = append(r.held, key), append(r.leases, key)
		} else if v.Holder != o.replica && v.isTaken() {
			r.untaken = slices.DeleteFunc(r.untaken, func(k string) bool { return k == key })
		}
	}
	sessions, err := sessionsIn(ctx, store)
	for _, v := range sessions {
		if v.Holder != o.replica || v.State != stateHeld {
			continue
		}
		r.hasSession = true
		for _, k := range v.Claims {
			r.held = append(r.held, fmt.Sprintf("%d of %s", k.Claims, printable(k.Kind)))
		}
	}
	return r, err
}

// drainList is what list --drained shows.
type drainList []drainView

type drainView struct {
	Replica string `json:"replica"`
	By      string `json:"by,omitempty"`
	LeftMS  int64  `json:"left_ms"`
}

func viewOfDrain(d tenure.Drained) drainView {
	return drainView{d.Replica, d.By, d.Left.Milliseconds()}
}

func (l drainList) print(w io.Writer) error {
	table := newSheet(w)
	table.row("DRAINED", "FOR", "BY")
	for _, v := range l {
		table.row(printable(v.Replica), "another "+ms(v.LeftMS).Round(time.Second).String(), printable(v.By))
	}
	return table.Flush()
}
