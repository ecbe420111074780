package main

import (
	"context"
	"slices"
)

// measure is one thing that is measured for all peers.
type measure struct {
	name  string
	about string

	// waits means that its figures are timeouts and counts, which other measures do not
	// disturb. All of these measures run at the same time; each other one runs alone.
	waits bool

	// named means that it runs only if it is asked for by its name.
	named bool

	run func(ctx context.Context, b *bench) error
}

// measures are in the order in which they run.
var measures = []measure{
	footprintMeasure, // before etcd's memory varies
	statementsMeasure,
	acquireMeasure,
	renewMeasure,
	handoverMeasure,
	saturatedMeasure,
	claimsMeasure,
	rowsMeasure,
	sustainedMeasure,
	notifyMeasure,
	fencedMeasure,
	failoverMeasure,
	partitionMeasure,
	idleMeasure,
	witnessMeasure,
	scaleMeasure,
	requestsMeasure,
	shortTTLMeasure,
	attachMeasure,
	sessionsMeasure,
}

// usual returns the measures that run unless others are named.
func usual() []measure {
	return slices.DeleteFunc(slices.Clone(measures), func(m measure) bool { return m.named })
}
