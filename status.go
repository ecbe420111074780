package tenure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Role is what a replica is with regard to a lease.
type Role uint8

const (
	Standby    Role = iota // waits for the lease
	Confirming             // has taken the lease over, and makes sure that its predecessor is gone before the job begins
	Holder                 // holds the lease; its job runs
	Stopping               // its job has been told to return; the lease is released once it has
)

func (r Role) String() string {
	switch r {
	case Standby:
		return "standby"
	case Holder:
		return "holder"
	case Stopping:
		return "stopping"
	case Confirming:
		return "confirming"
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// Status is what a [Coordinator] knows without asking the store.
type Status struct {
	Replica   string // this replica's name
	Role      Role
	Since     time.Time     // of the role
	Holder    string        // who held the lease when it was last seen; empty: nobody
	Token     int64         // of the term held; 0 for a standby
	TrustLeft time.Duration // in the term held; 0 for a standby, and where there is no lease to lose
	Terms     int           // held so far by this coordinator
	Stuck     bool          // the job did not return in time, and still runs
	LastError string        // of the last call to the store; empty: it went well
}

// Status returns what the coordinator knows. It does no I/O.
func (c *Coordinator) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	status := c.status
	if c.held != nil && !c.held.local() {
		status.TrustLeft = c.held.Remaining()
	}
	return status
}

// enterTerm notes that a term has begun. Its job has not.
func (c *Coordinator) enterTerm(term *Term, keeper *keeper) {
	c.log().Info("lease acquired", "holder", term.Holder(), "token", term.Token())
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held, c.resign, c.token = term, &resignation{lost: keeper.lost}, term.Token()
	c.status.Role, c.status.Since = Confirming, time.Now()
	c.status.Holder, c.status.Token, c.status.LastError = term.Holder(), term.Token(), ""
	c.status.Terms++
}

// becomeHolder notes that the term's job begins.
func (c *Coordinator) becomeHolder(term *Term) {
	c.term.Store(term)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.Role, c.status.Since = Holder, time.Now()
}

func (c *Coordinator) stopping(term *Term, cause error) {
	c.term.Store(nil)
	c.mu.Lock()
	c.status.Role, c.status.Since = Stopping, time.Now()
	var lost *LostError
	if errors.As(cause, &lost) {
		c.status.Holder = ""
		if lost.To != nil {
			c.status.Holder = lost.To.Holder
		}
	}
	holder := c.status.Holder
	c.mu.Unlock()

	level, msg := slog.LevelDebug, "job is told to return"
	switch {
	case errors.Is(cause, ErrJobEnded):
		level, msg = slog.LevelWarn, "job ended before its term"
	case errors.Is(cause, ErrUnhealthy):
		level, msg = slog.LevelWarn, "replica is not fit to hold the lease"
	case errors.Is(cause, ErrLost), errors.Is(cause, ErrDeadline):
		level, msg = slog.LevelInfo, "lease lost"
	}
	c.log().Log(context.Background(), level, msg, "holder", holder, "token", term.Token(), "cause", cause)
}

// leaveTerm notes that the lease was given back, or could not be, and tells who has
// asked for it.
func (c *Coordinator) leaveTerm(err error) resignation {
	c.mu.Lock()
	defer c.mu.Unlock()
	resign := c.resign
	resign.err = err
	if resign.asked {
		close(resign.over)
	}
	c.held, c.resign = nil, nil
	if c.status.Holder == c.status.Replica {
		c.status.Holder = ""
	}
	c.status.Role, c.status.Since, c.status.Token = Standby, time.Now(), 0
	return *resign
}

func (c *Coordinator) lastToken() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.token
}

func (c *Coordinator) setStuck(stuck bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.Stuck = stuck
}

// log returns the logger, with what all lines of this coordinator say. To keep it
// would cost each of many leases more memory than their terms do.
func (c *Coordinator) log() *slog.Logger {
	return c.cfg.Logger.With("lease", c.lease.cfg.Key.String(), "replica", c.lease.cfg.Holder)
}

// note records what the store last said: who holds the lease, or an error.
func (c *Coordinator) note(holder string, err error) (changed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := c.status.LastError
	c.status.LastError = ""
	if err != nil {
		c.status.LastError = err.Error()
	} else {
		c.status.Holder = holder
	}
	return c.status.LastError != last
}

// report logs an error of the store: aloud when it is a new one, quietly while
// it stays the same.
func (c *Coordinator) report(msg string, err error) {
	level := slog.LevelDebug
	if c.note("", err) {
		level = slog.LevelWarn
	}
	c.log().Log(context.Background(), level, msg, "error", err)
}
