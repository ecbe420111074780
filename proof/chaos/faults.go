package main

import (
	"context"
	"errors"
	"syscall"
	"time"
)

const (
	paused        = "pause (SIGSTOP)"
	renewedByCopy = "renewed by a copy"
	inOrder       = "shutdown (SIGTERM)"
	handedOver    = "resign or drain"
)

type ending = func() (time.Duration, error)

// processFaults are the faults that need only processes. Some are not really faults: they hand the
// lease over.
var processFaults = []faultKind{
	{name: killedAlone, group: "process", weight: 5, passes: true, begin: kill},
	{name: paused, group: "process", weight: 5, longer: 2, begin: stop},
	{name: inOrder, group: "process", weight: 4, passes: true, begin: shutdown},
	{name: handedOver, group: "process", weight: 6, passes: true, begin: resign},
}

// kill kills one replica or more. The fault ends immediately, because another replica can
// take over. At its end the killed ones are restarted.
func kill(_ context.Context, p *phase) (string, ending, error) {
	victims := p.victims(1 + p.rand.IntN(2))
	var last time.Duration
	for _, v := range victims {
		at, err := v.kill()
		if err != nil {
			return "", nil, err
		}
		last = at
	}
	return names(victims), func() (time.Duration, error) { return last, startAll(victims) }, nil
}

func shutdown(_ context.Context, p *phase) (string, ending, error) {
	return handOver(p, (*process).terminate, startAll)
}

func resign(_ context.Context, p *phase) (string, ending, error) {
	return handOver(p, (*process).resign, func([]*process) error { return nil })
}

// handOver makes one replica give its lease up. The fault ends once it has.
func handOver(p *phase, giveUp func(*process) error, end func([]*process) error) (string, ending, error) {
	victims := p.victims(1)
	for _, v := range victims {
		if err := giveUp(v); err != nil {
			return "", nil, err
		}
	}
	at := monotonic()
	return names(victims), func() (time.Duration, error) { return at, end(victims) }, nil
}

func startAll(processes []*process) error {
	var errs []error
	for _, v := range processes {
		errs = append(errs, v.start())
	}
	return errors.Join(errs...)
}

// renewByCopy does once what a copy of the holder's process or machine would do: it renews
// the record without changing its payload. The holder must notice at its next renewal and end its
// term. No replica renews the record after that, so the next term must begin once it expires.
func renewByCopy(renew func(context.Context) (term string, version int64, err error)) func(context.Context, *phase) (string, ending, error) {
	return func(ctx context.Context, p *phase) (string, ending, error) {
		term, version, err := renew(ctx)
		at := monotonic()
		p.record.copied = append(p.record.copied, version)
		if err != nil || term == "" {
			return "nobody", func() (time.Duration, error) { return at, nil }, err
		}
		return "term " + term, func() (time.Duration, error) {
			p.awaitJob(ctx, 2*p.ttl, func(of string) bool { return of != term })
			return at, nil
		}, nil
	}
}

func stop(_ context.Context, p *phase) (string, ending, error) {
	victims := p.victims(1 + p.rand.IntN(3))
	end, err := freeze(p, victims)
	return names(victims), end, err
}

// freeze stops processes, and resumes them at its end.
func freeze(p *phase, victims []*process) (ending, error) {
	from := monotonic()
	signal := func(s syscall.Signal) (err error) {
		for _, v := range victims {
			if v.Runs() { // a fault at the same time may have ended it
				err = errors.Join(err, v.signal(s))
			}
		}
		return err
	}
	if err := signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}
	return func() (time.Duration, error) {
		err := signal(syscall.SIGCONT)
		to := monotonic()
		for _, v := range victims {
			p.record.paused(v.name(), from, to)
		}
		return to, err
	}, nil
}
