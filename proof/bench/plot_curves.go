package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// curvePlot is a panel with lines: a figure over what it depends on, both on logarithmic axes.
type curvePlot struct {
	title, subtitle string
	xLabel, yLabel  func(float64) string
	// point returns the line that a figure belongs to, and where on it.
	point func(r record) (line string, x float64, ok bool)
}

var curvePlots = []curvePlot{
	{"Acquire and release", "pairs per second, by workers", short, short, func(r record) (string, float64, bool) {
		var x float64
		n, _ := fmt.Sscanf(r.Metric, "%g workers", &x)
		return r.Peer, x, r.Measure == "scale" && n == 1
	}},
	{"Claims of one process", "keys per second, by keys", short, short, func(r record) (string, float64, bool) {
		var line string
		var x float64
		n, _ := fmt.Sscanf(r.Metric, "%s %g keys", &line, &x)
		return line, x, r.Measure == "scale" && n == 2
	}},
	{"Failover", "p99 beyond the TTL, by TTL (s)", func(ms float64) string { return figure(ms / 1000) }, inWords, func(r record) (string, float64, bool) {
		name, rest, _ := strings.Cut(r.Peer, ", TTL ")
		ttl, loops, _ := strings.Cut(rest, ", ")
		x, err := time.ParseDuration(ttl)
		if loops != "0 busy loops" {
			name += ", CPUs busy"
		}
		return name, milliseconds(x), r.Measure == "short-ttl" && r.Metric == "beyond the TTL p99" && err == nil
	}},
}

// lineColours stand out from white and from black. The first is that of the first line that is not the floor's.
var lineColours = []string{plotOurs, "#d29922", "#3fb950", "#a371f7", "#f85149", "#39c5cf", "#db61a2"}

const (
	curveWidth  = 210
	curveHeight = 190
	curveLeft   = 48 // the labels of the vertical axis
	curveTop    = 60
	curveRow    = 18 // of the legend
)

type point struct{ x, y float64 }

// short formats numbers for an axis.
func short(v float64) string {
	switch {
	case v >= 1e6:
		return figure(v/1e6) + " M"
	case v >= 1e3:
		return figure(v/1e3) + " k"
	}
	return figure(v)
}

// drawCurves draws the panels for which there are figures. It returns an SVG document.
func drawCurves(records []record, f facts) []byte {
	var b strings.Builder
	panels, most := 0, 0
	for _, p := range curvePlots {
		lines, names := p.lines(records)
		if len(names) == 0 {
			continue
		}
		left := curveLeft + panels*(curveWidth+curveLeft+14)
		fmt.Fprintf(&b, `<text x="%d" y="20" font-size="17" font-weight="600">%s</text><text x="%d" y="40">%s</text>`+"\n", left, p.title, left, p.subtitle)
		p.draw(&b, left, lines, names)
		panels, most = panels+1, max(most, len(names))
	}
	width, height := max(1, panels)*(curveWidth+curveLeft+14), curveTop+curveHeight+38+most*curveRow+24
	return []byte(svgHead(width, height, "Rates and failovers, by workers, keys and TTL") + b.String() + svgEnd(width-14, height-8, f))
}

// lines returns the panel's lines, and their names in the order in which peers are listed.
func (p curvePlot) lines(records []record) (lines map[string][]point, names []string) {
	lines = make(map[string][]point)
	for _, r := range records {
		if name, x, ok := p.point(r); ok && x > 0 && r.Value > 0 {
			lines[name] = append(lines[name], point{x, r.Value})
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return rank(a) - rank(b) })
	return lines, names
}

func (p curvePlot) draw(b *strings.Builder, left int, lines map[string][]point, names []string) {
	least, most := point{math.Inf(1), math.Inf(1)}, point{}
	for _, line := range lines {
		for _, at := range line {
			least, most = point{min(least.x, at.x), min(least.y, at.y)}, point{max(most.x, at.x), max(most.y, at.y)}
		}
	}
	bottom := curveTop + curveHeight
	from, to := math.Floor(math.Log10(least.y)), math.Ceil(math.Log10(most.y)+0.01)
	xAt := func(x float64) float64 {
		return float64(left) + curveWidth*math.Log(x/least.x)/max(math.Log(most.x/least.x), 1e-9)
	}
	yAt := func(y float64) float64 { return float64(bottom) - curveHeight*(math.Log10(y)-from)/(to-from) }
	for power := from; power <= to; power++ {
		y := yAt(math.Pow(10, power))
		fmt.Fprintf(b, `<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s"/><text x="%d" y="%.1f" text-anchor="end" font-size="12">%s</text>`+"\n",
			left, y, left+curveWidth, y, plotGrid, left-6, y+4, p.yLabel(math.Pow(10, power)))
	}
	for _, at := range lines[names[0]] {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle" font-size="12">%s</text>`+"\n", xAt(at.x), bottom+18, p.xLabel(at.x))
	}
	free := lineColours
	for i, name := range names {
		colour, line := plotOthers, lines[name]
		if name != floorPeer.name && len(free) > 0 {
			colour, free = free[0], free[1:]
		}
		slices.SortFunc(line, func(a, b point) int { return int(math.Copysign(1, a.x-b.x)) })
		var places []string
		for _, at := range line {
			places = append(places, fmt.Sprintf("%.1f,%.1f", xAt(at.x), yAt(at.y)))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, xAt(at.x), yAt(at.y), colour)
		}
		y := bottom + 38 + i*curveRow
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, strings.Join(places, " "), colour)
		fmt.Fprintf(b, `<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="3"/><text x="%d" y="%d" font-size="13">%s</text>`+"\n",
			left, y, left+16, y, colour, left+22, y+5, escape(name))
	}
}
